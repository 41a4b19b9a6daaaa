"""The dict that DeepSpeed gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed.accelerator import get_accelerator

from ds_ulysses.config import OPTIONS, get_nested, load_deepspeed_json, resolve_batch_sizes


def deepspeed_config(source: Mapping[str, Any], dp_size: int) -> dict[str, Any]:
    """Take our settings out, and fill batch sizes in. Raises `ValueError` for values that are left open."""
    config = load_deepspeed_json(source)
    if open_values := sorted(_paths_of(config, "auto")):
        raise ValueError(
            f'"auto" is left in {", ".join(open_values)}: only a trainer that knows its arguments can fill it. '
            f"Write numbers, or leave the keys out."
        )
    for key in (OPTIONS, "sequence_parallel_size"):
        config.pop(key, None)
    sizes = resolve_batch_sizes(config, dp_size)
    config["train_batch_size"] = sizes.train
    config["train_micro_batch_size_per_gpu"] = sizes.micro
    config["gradient_accumulation_steps"] = sizes.accumulation
    adam = str(get_nested(config, "optimizer.type")).lower() in ("adam", "adamw")
    if adam and get_accelerator().device_name() == "cpu":
        # DeepSpeed's own CPU Adam is compiled at first use, which takes minutes.
        config["optimizer"].setdefault("params", {})["torch_adam"] = True
    return config


def _paths_of(config: Mapping[str, Any], wanted: str, prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, Mapping) and key != OPTIONS:
            yield from _paths_of(value, wanted, f"{prefix}{key}.")
        elif value == wanted:
            yield prefix + key
