"""Sequence-parallel settings, read from an ordinary DeepSpeed JSON.

`"sequence_parallel_size": P` stands at the top level, as DeepSpeed names it; everything else of ours stands
in one optional block:

    "ds_ulysses": {"strategy": "hierarchical", "ring_size": 2, "kernel": "auto", "logits_tile_size": 1024}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ds_ulysses.config.constants import OPTIONS
from ds_ulysses.config.deepspeed_json import load_deepspeed_json, refuse_unsupported

STRATEGIES = ("auto", "ulysses", "ring", "all_gather", "hierarchical")
LAYOUTS = ("auto", "contiguous", "zigzag")
GRAD_DTYPES = ("fp32", "bf16", "fp16")
KERNELS = ("auto", "cpu_flash", "eager", "flash_attn_2", "flash_attn_3", "flash_attn_4", "torch_varlen")


@dataclass(frozen=True, kw_only=True)
class SequenceParallelConfig:
    """The settings that split one sequence over ranks. Checks itself; raises `ValueError` that names the field."""

    sequence_parallel_size: int = 1
    """Ranks that share one sequence. The world size must be a multiple of it."""
    strategy: str = "auto"
    """`ulysses`: all-to-all from sequence-sharded to head-sharded and back. `ring`: keys and values come by, block by
    block. `all_gather`: they are gathered, for short sequences. `hierarchical`: Ulysses inside, ring across.
    `auto`: the one that sends least, see placement/mesh.py."""
    ulysses_size: int | str = "auto"
    """Ranks of the Ulysses level; times `ring_size` it is `sequence_parallel_size`."""
    ring_size: int | str = "auto"
    """Ranks of the ring level; 1: no ring."""
    ulysses_head_groups: int = 1
    """`ulysses` only: heads travel in this many groups, each while the one before is computed."""
    layout: str = "auto"
    """Where tokens live on the ring: `contiguous` slices, or `zigzag`, early and late ones paired, which gives ranks
    equal work under a causal mask. `auto` is zigzag where there is a ring."""
    grad_dtype: str = "fp32"
    """What gradients of keys and values travel in over the ring: `fp32` (at least), `bf16` or `fp16`."""
    packed: bool = False
    """Whether rows hold many documents; `auto` then prefers Ulysses, whose kernel calls stay long."""
    kernel: str = "auto"
    """Attention inside a rank; `auto` takes the fastest that can do what the model needs."""
    logits_tile_size: int = 1024
    """Tokens whose logits exist at once in the loss. Peak memory: tile x vocabulary x 4 bytes, twice."""

    def __post_init__(self) -> None:
        _check_positive_int("sequence_parallel_size", self.sequence_parallel_size)
        for name in ("ulysses_size", "ring_size"):
            if getattr(self, name) != "auto":
                _check_positive_int(name, getattr(self, name))
        _check_positive_int("ulysses_head_groups", self.ulysses_head_groups)
        _check_positive_int("logits_tile_size", self.logits_tile_size)
        _check_choice("strategy", self.strategy, STRATEGIES)
        _check_choice("layout", self.layout, LAYOUTS)
        _check_choice("kernel", self.kernel, KERNELS)
        _check_choice("grad_dtype", self.grad_dtype, GRAD_DTYPES)
        if not isinstance(self.packed, bool):
            raise ValueError(f'"packed" is {self.packed!r}, but it must be true or false.')

    @classmethod
    def from_deepspeed(cls, source: str | Path | Mapping[str, Any]) -> SequenceParallelConfig:
        """Read the settings from a DeepSpeed JSON file or the dict of one.

        Raises `ValueError` for a file that cannot be read, an unknown key in the `ds_ulysses` block, a bad
        value, or a DeepSpeed setting under which sequence parallelism would not be exact.
        """
        config = load_deepspeed_json(source)
        block = config.get(OPTIONS, {})
        if not isinstance(block, dict):
            raise ValueError(f'"{OPTIONS}" is {block!r}, but it must be an object of options.')
        known = {field.name for field in fields(cls)} - {"sequence_parallel_size"}
        if unknown := sorted(set(block) - known):
            raise ValueError(
                f'Unknown key {", ".join(map(repr, unknown))} in "{OPTIONS}": it would be ignored. '
                f"Known keys: {', '.join(sorted(known))}."
            )
        settings = cls(sequence_parallel_size=config.get("sequence_parallel_size", 1), **block)
        refuse_unsupported(config, settings.sequence_parallel_size)
        return settings


def _check_positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f'"{name}" is {value!r}, but it must be a whole number of at least 1.')


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f'"{name}" is {value!r}, which this version cannot do. Choose one of: {", ".join(choices)}.')
