"""The balancing loss of a mixture of experts, over the tokens of all ranks.

    loss = E * sum over experts of (share of assignments) * (mean probability)

Fedus et al., "Switch Transformers" (arXiv:2101.03961), equations 4 to 6, over all layers together as transformers has
it. It is a product of two means over the whole batch, so the mean over ranks of the losses of shards would be another
number. Shares carry no gradient; that of a rank's probabilities is E * shares / tokens.

Shapes: n tokens of this shard times the layers that route, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """The routing of this shard's tokens, summed over them and over layers."""

    assigned: Tensor
    """[E]: how often an expert was chosen."""
    probabilities: Tensor
    """[E]: of the router's softmax; differentiable."""
    num_tokens: Tensor
    """0-dim: tokens times layers."""
    coefficient: float
    """Weight of the balancing loss."""


class Penalty(NamedTuple):
    """The balancing loss of all ranks."""

    loss: Tensor
    """0-dim, as the model reports it."""
    weighted: Tensor
    """0-dim, as it is added to the loss."""
    gradient: Tensor
    """[E]: of `weighted` with respect to each rank's probabilities."""


def route(logits: Sequence[Tensor], top_k: int, coefficient: float, real: Tensor | None) -> Routing:
    """Sum up router logits [n, E], one of each layer; `real` [n] tells tokens from padding, None: all are.

    Raises `ValueError` if no gradient would reach the router.
    """
    if torch.is_grad_enabled() and not any(x.requires_grad for x in logits):
        raise ValueError(
            "The balancing loss of the experts would have no gradient: reentrant gradient checkpointing hides the "
            'router. Use gradient_checkpointing_enable({"use_reentrant": False}), or set output_router_logits to False.'
        )
    num_experts = logits[0].shape[1]
    assigned, probabilities = (logits[0].new_zeros(num_experts, dtype=torch.float32) for _ in range(2))
    num_tokens = logits[0].new_zeros((), dtype=torch.float32)
    for layer in logits:
        weights = layer.softmax(dim=-1)
        chosen = weights.new_zeros(weights.shape, dtype=torch.float32)
        chosen.scatter_(1, weights.topk(top_k, dim=-1).indices, 1.0)
        keep = chosen.new_ones(len(chosen)) if real is None else real.to(chosen)
        assigned = assigned + keep @ chosen
        probabilities = probabilities + (weights.float() * keep[:, None]).sum(dim=0)
        num_tokens = num_tokens + keep.sum()
    return Routing(assigned.detach(), probabilities, num_tokens, coefficient)


def balance(totals: Tensor, coefficient: float) -> Penalty:
    """Balance by sums of all ranks, [1 + 2 E] of tokens, assignments and probabilities. No token anywhere: loss 0."""
    num_tokens, (assigned, probabilities) = totals[0].clamp(min=1), totals[1:].chunk(2)
    gradient = len(assigned) * assigned / num_tokens**2
    loss = gradient @ probabilities
    return Penalty(loss, coefficient * loss, coefficient * gradient)
