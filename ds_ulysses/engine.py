"""`initialize`: deepspeed.initialize with sequence parallelism wired in and its gradients checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from ds_ulysses.config import BLOCK, SequenceParallelConfig
from ds_ulysses.deepspeed_json import compute_dtype, get_nested, load_deepspeed_json, resolve_batch_sizes
from ds_ulysses.gradients import check_gradient_divisor, gradient_divisor, scale_gradients
from ds_ulysses.kernels import Kernel, Request, select_kernel
from ds_ulysses.loss import StepNormalizer
from ds_ulysses.patch import find_model, patch_model, unpatch_model
from ds_ulysses.support import attention_softcap, head_counts, head_dims, refuse_unsupported_model
from ds_ulysses.topology import Topology


class SequenceParallelEngine(DeepSpeedEngine):  # type: ignore[misc]
    """A DeepSpeed engine whose gradients equal those of one process that sees the whole step's tokens."""

    topology: Topology
    normalizer: StepNormalizer

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """As DeepSpeed's; the division by accumulation steps is part of the loss's arithmetic and stays on."""
        if not scale_wrt_gas:
            raise ValueError("scale_wrt_gas=False: the loss counts the tokens of the whole step already. Leave it out.")
        scaled: Tensor = super().backward(loss, retain_graph=retain_graph)
        return scaled

    def _backward_epilogue(self) -> None:
        super()._backward_epilogue()
        if self.is_gradient_accumulation_boundary():
            missing = self.normalizer.close()
            if missing is not None:
                scale_gradients(self, missing)
            if not (self.zero_optimization() or self.bfloat16_enabled() or self.fp16_enabled()):
                # Plain fp32 is the one mode in which DeepSpeed keeps no norm.
                grads = [p.grad for p in self.module.parameters() if p.grad is not None]
                self._global_grad_norm = nn.utils.get_total_norm(grads)

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step's gradient before clipping, by then the one of all tokens on all ranks."""
        norm = super().get_global_grad_norm()
        return None if norm is None else float(norm)


def initialize(
    model: nn.Module,
    config: str | Path | Mapping[str, Any],
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[..., Any] | None = None,
) -> tuple[SequenceParallelEngine, Any, Any, Any]:
    """As `deepspeed.initialize`: returns engine, optimizer, dataloader and lr scheduler.

    `config` is a DeepSpeed JSON or its dict; `model` a Hugging Face causal LM, or a module that wraps one. The
    engine has `.topology`, for `shard_batch`. Raises `ValueError` on every rank, before the model is changed, for
    a setting or a model under which training would not be exact.
    """
    inner = find_model(model)
    refuse_unsupported_model(inner.config)
    topology = Topology.create(SequenceParallelConfig.from_deepspeed(config), head_counts(inner.config))
    ds_config = deepspeed_config(config, topology)
    choose_kernel(inner.config, compute_dtype(ds_config, next(inner.parameters()).dtype), topology)
    divisor = gradient_divisor(ds_config, topology)
    check_gradient_divisor(ds_config, topology, divisor)
    patch = patch_model(model, topology)
    try:
        engine, *rest = deepspeed.initialize(
            model=model,
            config=ds_config,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            collate_fn=collate_fn,
            mpu=topology.mpu if topology.sp_size > 1 else None,
        )
    except BaseException:
        unpatch_model(model)
        raise
    return _adopt(engine, topology, patch.normalizer, divisor), *rest


def _adopt(engine: Any, topology: Topology, normalizer: StepNormalizer, divisor: int) -> SequenceParallelEngine:
    """Make DeepSpeed's engine one of ours."""
    engine.__class__ = SequenceParallelEngine  # deepspeed.initialize offers no way to name a class
    engine.topology, engine.normalizer = topology, normalizer
    normalizer.factor = float(divisor * engine.gradient_accumulation_steps())
    return engine


def choose_kernel(config: Any, dtype: torch.dtype, topology: Topology) -> tuple[Kernel, str]:
    """The kernel that a model's layers will use, and why. Raises `ValueError` if there is none."""
    request = Request(topology.device.type, dtype, max(head_dims(config)), attention_softcap(config))
    return select_kernel(topology.config.kernel, request)


def deepspeed_config(source: str | Path | Mapping[str, Any], topology: Topology) -> dict[str, Any]:
    """The dict that DeepSpeed gets: ours taken out, batch sizes filled in. Raises `ValueError`."""
    config = load_deepspeed_json(source)
    if open_values := sorted(_paths_of(config, "auto")):
        raise ValueError(
            f'"auto" is left in {", ".join(open_values)}: only a trainer that knows its arguments can fill it. '
            f"Write numbers, or leave the keys out."
        )
    for key in (BLOCK, "sequence_parallel_size"):
        config.pop(key, None)
    sizes = resolve_batch_sizes(config, topology.dp_size)
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
        if isinstance(value, Mapping) and key != BLOCK:
            yield from _paths_of(value, wanted, f"{prefix}{key}.")
        elif value == wanted:
            yield prefix + key
