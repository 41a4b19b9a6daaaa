"""What DeepSpeed does to gradients: the divisor of each ZeRO stage, its check at start, and rescaling in place.

DeepSpeed sums gradients over all ranks, then divides by dp_size at ZeRO 0 to 2 but by the world size at ZeRO-3.
The loss multiplies by the same number, so that the sum alone remains.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger, safe_get_full_grad, safe_get_local_grad, safe_set_local_grad
from torch import Tensor, nn

from ds_ulysses.comm import Topology
from ds_ulysses.config import get_nested, zero_stage
from ds_ulysses.engine.mpu import mpu_of

# The probe runs under the user's own settings of how gradients are reduced, and of nothing else.
REDUCTION_KEYS = (
    "prescale_gradients",
    "gradient_predivide_factor",
    "gradient_allreduce_op",
    "communication_data_type",
    "seq_parallel_communication_data_type",
)
ZERO_REDUCTION_KEYS = (
    "stage", "reduce_scatter", "contiguous_gradients", "overlap_comm", "round_robin_gradients",
    "use_multi_rank_bucket_allreduce",
)  # fmt: skip
PROBE_BUCKET = 64
"""Elements; the probe has one parameter below it and one above, which DeepSpeed reduces by different paths."""


def gradient_divisor(config: Mapping[str, Any], topology: Topology) -> int:
    """Return what DeepSpeed divides the sum of all ranks' gradients by, accumulation aside."""
    return topology.world_size if zero_stage(config) == 3 else topology.dp_size


class _Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.zeros(PROBE_BUCKET // 4))
        self.large = nn.Parameter(torch.zeros(PROBE_BUCKET * 4))

    def forward(self, scale: float) -> Tensor:
        """Return a loss whose gradient is `scale` everywhere."""
        return (self.small.sum() + self.large.sum()) * scale


def check_gradient_divisor(config: Mapping[str, Any], topology: Topology, expected: int) -> None:
    """Measure the divisor under this config with a backward pass whose gradients are known.

    Collective; a fraction of a second. Raises `ValueError` on every rank if it is not as expected.
    """
    probe = _Probe()
    with _quiet():
        engine, *_ = deepspeed.initialize(
            model=probe,
            config=_probe_config(config),
            optimizer=torch.optim.SGD(probe.parameters(), lr=0.0),
            mpu=mpu_of(topology),
        )
        engine.backward(engine(float(topology.rank + 1)))
        means = [safe_get_full_grad(parameter).mean().item() for parameter in probe.parameters()]
        engine.destroy()
    total = topology.world_size * (topology.world_size + 1) / 2
    if any(abs(mean * expected - total) > 1e-2 * total for mean in means):
        found = [round(total / mean, 3) for mean in means]
        raise ValueError(
            f"DeepSpeed {deepspeed.__version__} divides gradients by {found} under this config, not by {expected}: "
            f"training would be off by that. Use plain ZeRO 0, 1, 2 or 3."
        )


def _probe_config(config: Mapping[str, Any]) -> dict[str, Any]:
    zero = {
        key: value
        for key in ZERO_REDUCTION_KEYS
        if (value := get_nested(config, f"zero_optimization.{key}")) is not None
    }
    reduction = {key: config[key] for key in REDUCTION_KEYS if key in config}
    return reduction | {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero | {"reduce_bucket_size": PROBE_BUCKET},
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed announces an engine in dozens of lines; the probe is not the one that anybody waits for."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def scale_gradients(engine: DeepSpeedEngine, factor: Tensor) -> None:
    """Multiply the accumulated gradients by `factor` (0-dim), where DeepSpeed keeps them. No communication."""
    for parameter in engine.module.parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_id"):  # ZeRO-3: this rank's partition
            gradient = safe_get_local_grad(parameter)
            safe_set_local_grad(parameter, gradient * factor.to(gradient))
        elif getattr(parameter, "_hp_grad", None) is not None:  # bf16 without ZeRO: an fp32 copy of its own
            parameter._hp_grad.mul_(factor)
        elif parameter.grad is not None:
            parameter.grad.mul_(factor)
        elif parameter._hp_mapping is not None:  # ZeRO-1 and 2: the part in this rank's partition, if any
            parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group).mul_(factor)
    if engine.zero_use_cpu_optimizer() and engine.zero_optimization_stage() < 3:
        # Offload took the norms, by which it clips, as the gradients arrived.
        norms = engine.optimizer.norm_for_param_grads
        for index in norms:
            norms[index] = norms[index] * factor
