"""Reading a DeepSpeed JSON: load it, refuse what cannot be exact, and do its batch arithmetic in integers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ds_ulysses.config.shipped import or_shipped


def load_deepspeed_json(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict of a DeepSpeed JSON file, or a deep copy of a dict. Raises `ValueError`."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    path = or_shipped(source)
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_refuse_duplicates)
    except OSError as error:
        raise ValueError(f"Cannot read the DeepSpeed config {path}: {error.strerror}. Check the path.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"The DeepSpeed config {path} is not valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"The DeepSpeed config {path} holds a {type(config).__name__}; it must be a JSON object.")
    return config


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    config = dict(pairs)
    if len(config) != len(pairs):
        twice = sorted({key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1})
        raise ValueError(f"The DeepSpeed config gives {', '.join(map(repr, twice))} twice; only one would count.")
    return config


def get_nested(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value at a dotted path (`zero_optimization.stage`), or `default` where any part is missing."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


def zero_stage(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage of a DeepSpeed config; 0 where the block is missing."""
    return int(get_nested(config, "zero_optimization.stage", 0))


def compute_dtype(config: Mapping[str, Any], otherwise: str = "fp32") -> str:
    """Return what DeepSpeed casts the model to: bf16 or fp16; `otherwise` if it leaves the model as it is."""
    if get_nested(config, "bf16.enabled"):
        return "bf16"
    return "fp16" if get_nested(config, "fp16.enabled") else otherwise


class Refusal(NamedTuple):
    """One DeepSpeed setting under which sequence parallelism would not be exact."""

    path: str
    applies: Callable[[Any], bool]
    reason: str


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


# Each reason ends the sentence "... cannot be used with sequence parallelism: <reason>".
REFUSALS = (
    Refusal(
        "data_parallel_size",
        lambda value: value is not None,
        "DeepSpeed would build a mesh whose ZeRO group leaves out the sequence-parallel ranks, and their weights would "
        "drift apart. Remove it: it is world / sequence_parallel_size",
    ),
    Refusal("tensor_parallel.autotp_size", _above_one, "heads would be split twice. Remove the block"),
    Refusal("zero_optimization.zero_hpz_partition_size", _above_one, "hpZ has not been tested. Set it to 1"),
    Refusal("zero_optimization.mics_shard_size", lambda value: (value or 0) > 0, "MiCS has not been tested. Remove it"),
    Refusal("zero_optimization.zero_quantized_weights", bool, "quantised weights are not exact. Set it to false"),
    Refusal("zero_optimization.zero_quantized_gradients", bool, "quantised gradients are not exact. Set it to false"),
    Refusal("zero_optimization.zenflow", bool, "delayed updates are not exact. Remove it"),
    Refusal("hybrid_engine.enabled", bool, "its inference pass bypasses the head exchange. Set it to false"),
    Refusal("sparse_gradients", bool, "sparse gradients are averaged by another rule. Set it to false"),
    Refusal("torch_autocast.enabled", bool, "the loss has not been tested under autocast. Use the bf16 or fp16 block"),
    Refusal(
        "managed_gradient_accumulation",
        lambda value: value is False,
        "the token count of a step closes at DeepSpeed's own accumulation boundary. Remove it",
    ),
    Refusal("curriculum_learning.enabled", bool, "it would cut sequences that are sharded already. Set it to false"),
    Refusal("data_efficiency.enabled", bool, "it would cut or route tokens that are sharded already. Set it to false"),
    Refusal("progressive_layer_drop.enabled", bool, "layers dropped at random are not exact. Set it to false"),
    Refusal(
        "compile.passes",
        lambda value: "autosp" in (value or ()),
        "AutoSP would shard the sequence a second time. Remove it from the passes",
    ),
    Refusal(
        "optimizer.type",
        lambda value: str(value).lower() in {"onebitadam", "zerooneadam", "onebitlamb"},
        "its compressed gradients are not exact. Use AdamW",
    ),
)


def refuse_unsupported(config: Mapping[str, Any], sp_size: int) -> None:
    """Raise `ValueError` for the first setting that would make gradients wrong under `sp_size` > 1."""
    if sp_size == 1:
        return
    for path, applies, reason in REFUSALS:
        value = get_nested(config, path)
        if applies(value):
            raise ValueError(f'"{path}": {value!r} cannot be used with sequence parallelism: {reason}.')
    if zero_stage(config) == 3 and get_nested(config, "zero_optimization.reduce_scatter", True) is False:
        raise ValueError(
            '"zero_optimization.reduce_scatter": false cannot be used with ZeRO-3 and sequence parallelism: DeepSpeed '
            "then divides large and small gradients by different numbers, so no single factor is right. Set it to true."
        )


@dataclass(frozen=True)
class BatchSizes:
    """The samples per optimizer step and how they are made: `train = micro * accumulation * dp_size`."""

    train: int
    micro: int
    accumulation: int


BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def resolve_batch_sizes(config: Mapping[str, Any], dp_size: int) -> BatchSizes:
    """Fill in the batch sizes that the JSON leaves open, as DeepSpeed does. Counts are samples.

    `dp_size` is world / sequence_parallel_size: the ranks of one group work on the same samples. Raises
    `ValueError` with the numbers where they contradict each other.
    """
    given = {key: config[key] for key in BATCH_KEYS if config.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f'"{key}" is {value!r}, but it must be a whole number of at least 1.')
    train, micro, accumulation = (given.get(key) for key in BATCH_KEYS)
    if micro is None:
        if train is None:
            raise ValueError('Give "train_micro_batch_size_per_gpu" or "train_batch_size": the batch size is open.')
        accumulation = accumulation or 1
        micro = train // (accumulation * dp_size)
    elif accumulation is None:
        accumulation = train // (micro * dp_size) if train else 1
    train = train or micro * accumulation * dp_size
    if micro * accumulation * dp_size != train or micro == 0:
        raise ValueError(
            f'"train_batch_size" is {train}, but micro batch {micro or "?"} x accumulation {accumulation or "?"} x '
            f"data-parallel size {dp_size} (world / sequence_parallel_size) does not give it. Change one of them."
        )
    return BatchSizes(train, micro, accumulation)
