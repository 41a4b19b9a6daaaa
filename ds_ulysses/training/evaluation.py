"""The loss on samples that are not trained on, sharded as training is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ds_ulysses.batch import shard_batch
from ds_ulysses.data import Batching, Samples, order_epoch, ready_steps
from ds_ulysses.engine import SequenceParallelEngine
from ds_ulysses.models import find_model


@dataclass(frozen=True)
class Evaluation:
    """The means over all supervised tokens."""

    loss: float
    num_targets: int

    @property
    def perplexity(self) -> float:
        """The perplexity that the loss stands for."""
        return math.exp(min(self.loss, 700.0))


def evaluate(engine: SequenceParallelEngine, samples: Samples, batching: Batching) -> Evaluation:
    """Evaluate each sample once. Collective. Neither gradients nor random numbers are touched; call it between steps.

    The balancing loss of experts, which is a means to train them, is left out.
    """
    orders = order_epoch(samples.documents, len(samples), batching)
    total, num_targets = torch.zeros((), device=engine.topology.device), 0
    engine.eval()
    with torch.no_grad():
        for step in ready_steps(orders, samples, batching, engine.topology.dp_rank):
            for batch, targets in zip(step.batches, step.order.num_targets(), strict=True):
                total += targets * _loss(engine, shard_batch(batch, engine.topology))
                num_targets += targets
    engine.train()
    return Evaluation(float(total / num_targets), num_targets)


def _loss(engine: SequenceParallelEngine, shard: dict[str, torch.Tensor]) -> torch.Tensor:
    outputs = engine(**shard)
    loss: torch.Tensor = outputs.loss
    if (balancing := getattr(outputs, "aux_loss", None)) is not None:
        loss = loss - find_model(engine.module).config.router_aux_loss_coef * balancing
    return loss
