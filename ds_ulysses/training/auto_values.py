""" "auto" values of a DeepSpeed JSON, filled from the arguments by the rules of transformers' Trainer."""

from __future__ import annotations

from typing import Any

import torch

from ds_ulysses.config import OPTIONS, get_nested, zero_stage
from ds_ulysses.training.arguments import MONITORS, SftArguments

AUTO = "auto"


def fill_from_arguments(config: dict[str, Any], arguments: SftArguments, world_size: int) -> dict[str, Any]:
    """Fill what the arguments alone decide; `sequence_parallel_size` defaults to all ranks.

    Raises `ValueError` that lists every value which the JSON and the arguments give differently.
    """
    _make_room(config, arguments)
    if arguments.packing or arguments.padding_free:  # what "auto" then takes for the strategy
        config.setdefault(OPTIONS, {}).setdefault("packed", True)
    for monitor in set(arguments.report_to) & set(MONITORS):
        config.setdefault(monitor, {}).setdefault("enabled", True)
    if "tensorboard" in config:
        config["tensorboard"] = {"output_path": arguments.output_dir, "job_name": "tensorboard"} | config["tensorboard"]
    if config.get("sequence_parallel_size") == AUTO:
        config["sequence_parallel_size"] = arguments.sequence_parallel_size or world_size
    differing = [
        f'"{path}" is {found!r} in the JSON, {value!r} by the arguments'
        for path, value in _values(arguments).items()
        if (found := _fill(config, path, value)) != value
    ]
    if "scheduler" in config and arguments.lr_scheduler_type != SftArguments.lr_scheduler_type:
        differing.append(f'"scheduler" is in the JSON, --lr_scheduler_type is {arguments.lr_scheduler_type!r}')
    if differing:
        raise ValueError('Give each value once, or write "auto" in the JSON: ' + "; ".join(differing) + ".")
    _fill(config, "scheduler.params.warmup_min_lr", 0)
    _fill(config, "fp16.enabled", False)
    _fill(config, "bf16.enabled", torch.cuda.is_available())
    if config.get("train_batch_size") == AUTO:
        del config["train_batch_size"]  # it follows from the other two
    return config


def _make_room(config: dict[str, Any], arguments: SftArguments) -> None:
    """Write "auto" where an argument belongs and the JSON has no place for it, so that none is ignored."""
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"):
        config.setdefault(key, AUTO)
    if arguments.sequence_parallel_size is not None:
        config.setdefault("sequence_parallel_size", AUTO)
    if arguments.bf16 is not None:
        config.setdefault("bf16", {}).setdefault("enabled", AUTO)
    offload = get_nested(config, "zero_optimization.offload_optimizer.device", "none") != "none"
    optimizer = config.setdefault("optimizer", {"type": "AdamW", "params": {"torch_adam": not offload}})
    adam = "adam" in str(optimizer.get("type")).lower()
    for key in ("lr", "weight_decay", "betas", "eps") if adam else ("lr", "weight_decay"):
        optimizer.setdefault("params", {}).setdefault(key, AUTO)


def _values(arguments: SftArguments) -> dict[str, Any]:
    """What the arguments say of each place in the JSON."""
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": arguments.per_device_train_batch_size,
        "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
        "gradient_clipping": arguments.max_grad_norm,
        "optimizer.params.lr": arguments.learning_rate,
        "optimizer.params.betas": [arguments.adam_beta1, arguments.adam_beta2],
        "optimizer.params.eps": arguments.adam_epsilon,
        "optimizer.params.weight_decay": arguments.weight_decay,
        "scheduler.params.warmup_max_lr": arguments.learning_rate,
        "scheduler.params.warmup_num_steps": max(arguments.warmup_steps, 1),
    }
    optional = {"sequence_parallel_size": arguments.sequence_parallel_size, "bf16.enabled": arguments.bf16}
    return values | {path: value for path, value in optional.items() if value is not None}


def fill_from_model(config: dict[str, Any], hidden_size: int) -> None:
    """Fill the bucket sizes, in elements, by the size of the model's matrices."""
    _fill(config, "zero_optimization.reduce_bucket_size", hidden_size * hidden_size)
    if zero_stage(config) == 3:
        _fill(config, "zero_optimization.stage3_prefetch_bucket_size", int(0.9 * hidden_size * hidden_size))
        _fill(config, "zero_optimization.stage3_param_persistence_threshold", 10 * hidden_size)


def fill_from_data(config: dict[str, Any], num_steps: int) -> None:
    """Fill the length of DeepSpeed's own schedule, in optimizer steps."""
    _fill(config, "scheduler.params.total_num_steps", num_steps)


def _fill(config: dict[str, Any], path: str, value: Any) -> Any:
    """Replace "auto" at a dotted path; return what stands there then, or `value` where nothing does."""
    *parents, key = path.split(".")
    for parent in parents:
        config = config.get(parent, {})
    if config.get(key) == AUTO:
        config[key] = value
    return config.get(key, value)
