"""`initialize`: deepspeed.initialize with sequence parallelism wired in and its gradients checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import deepspeed
import torch
from torch import nn
from typing_extensions import Unpack

from ds_ulysses.comm import Topology
from ds_ulysses.config import SequenceParallelConfig, compute_dtype, dtype_name, load_deepspeed_json, torch_dtype
from ds_ulysses.engine.deepspeed_config import deepspeed_config
from ds_ulysses.engine.distributed import init_distributed
from ds_ulysses.engine.engine import SequenceParallelEngine
from ds_ulysses.engine.gradients import check_gradient_divisor, gradient_divisor
from ds_ulysses.engine.mpu import mpu_of
from ds_ulysses.kernels import Kernel, Request, select_kernel
from ds_ulysses.models import facts, find_model, patch_model, refuse_unsupported_model, unpatch_model


class Start(NamedTuple):
    """What is settled before there are weights: all checks have passed but those of what a trainer fills in later.

    Batch sizes, values that are still "auto", and what DeepSpeed does to gradients, `initialize` looks at.
    """

    config: dict[str, Any]
    """The DeepSpeed JSON with our block, as it was given."""
    model_config: Any
    """Of the Hugging Face model."""
    topology: Topology
    kernel: Kernel
    kernel_reason: str


class DeepSpeedArguments(TypedDict, total=False):
    """The arguments that `initialize` hands on to `deepspeed.initialize` as they are."""

    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None
    model_parameters: Iterable[Any] | None
    training_data: Any
    lr_scheduler: Any
    collate_fn: Callable[..., Any] | None


def settle(
    model_config: Any, config: str | Path | Mapping[str, Any], topology: Topology | None = None, dtype: str = "fp32"
) -> Start:
    """Read the JSON, refuse what would not be exact, and build the groups unless there is a `topology`. Collective.

    `model_config` is that of the Hugging Face model; `dtype` (fp32, bf16, ...) is what its weights have where the JSON
    does not say. Raises `ValueError` on every rank.
    """
    refuse_unsupported_model(model_config)
    config = load_deepspeed_json(config)
    settings = SequenceParallelConfig.from_deepspeed(config)
    init_distributed()
    if topology is None:
        topology = Topology.create(settings, facts.head_counts(model_config))
    elif topology.config != settings:
        names = [f.name for f in fields(settings) if getattr(settings, f.name) != getattr(topology.config, f.name)]
        differing = ", ".join(f'"{n}": {getattr(topology.config, n)!r} and {getattr(settings, n)!r}' for n in names)
        raise ValueError(
            f"The topology and the DeepSpeed config say different things: {differing}; one would be ignored. Leave "
            f"`topology` out, or make it of the same config: `ds_ulysses.settle(model.config, config).topology`."
        )
    request = Request(
        topology.device.type,
        torch_dtype(compute_dtype(config, dtype)),
        max(facts.head_dims(model_config)),
        facts.has_softcap(model_config),
    )
    return Start(config, model_config, topology, *select_kernel(settings.kernel, request))


def initialize(
    model: nn.Module,
    config: str | Path | Mapping[str, Any],
    *,
    topology: Topology | None = None,
    **others: Unpack[DeepSpeedArguments],
) -> tuple[SequenceParallelEngine, Any, Any, Any]:
    """Build an engine as `deepspeed.initialize` does; returns it, optimizer, dataloader and lr scheduler. Collective.

    `config` is a DeepSpeed JSON or its dict; `model` a Hugging Face causal LM, or a module that wraps one. `topology`
    is one that was made of the same config; without it, it is made here. The engine has `.topology`, for
    `shard_batch`. Raises `ValueError` on every rank, before the model is changed, for a setting or a model under which
    training would not be exact.
    """
    inner = find_model(model)
    start = settle(inner.config, config, topology, dtype_name(next(inner.parameters()).dtype))
    topology = start.topology
    ds_config = deepspeed_config(start.config, topology.dp_size)
    divisor = gradient_divisor(ds_config, topology)
    check_gradient_divisor(ds_config, topology, divisor)
    patch = patch_model(model, topology)
    try:
        engine, *rest = deepspeed.initialize(model=model, config=ds_config, mpu=mpu_of(topology), **others)
    except BaseException:
        unpatch_model(model)
        raise
    return SequenceParallelEngine.adopt(engine, topology, patch.normalizer, divisor), *rest
