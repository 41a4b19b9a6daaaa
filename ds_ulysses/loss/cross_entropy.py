"""Cross entropy in tiles: never the logits of the whole shard.

Shapes: N tokens of this shard, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from ds_ulysses.config import IGNORE_INDEX, accumulation_dtype


class LogitsTransform(NamedTuple):
    """The change that a model makes to its logits: x -> cap * tanh(scale * x / cap); no cap if it is 0."""

    scale: float = 1.0
    cap: float = 0.0

    def apply_(self, logits: Tensor) -> Tensor:
        """Transform the logits in place."""
        if self.scale != 1:
            logits.mul_(self.scale)
        return logits.div_(self.cap).tanh_().mul_(self.cap) if self.cap else logits

    def slope(self, transformed: Tensor) -> Tensor | float:
        """Return the derivative where the result is `transformed`."""
        return (transformed / self.cap).square_().neg_().add_(1).mul_(self.scale) if self.cap else self.scale


PLAIN = LogitsTransform()


@torch.compiler.disable
def tiled_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, tile_size: int, transform: LogitsTransform = PLAIN
) -> Tensor:
    """Sum the token losses (0-dim, at least fp32), with the logits of `tile_size` tokens in memory at once.

    `hidden` [..., H], `weight` [V, H] of the output layer, `targets` [...]. Tokens without a target are not
    computed. The logits are formed again in the backward, which keeps one number per token instead of V.
    """
    loss: Tensor = _TiledCrossEntropy.apply(hidden.flatten(0, -2), weight, targets.flatten(), tile_size, transform)
    return loss


class _TiledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, tile_size: int, transform: LogitsTransform
    ) -> Tensor:
        """Sum the token losses, a tile at a time."""
        rows = (targets != IGNORE_INDEX).nonzero().squeeze(1)
        lse = hidden.new_empty(len(rows), dtype=accumulation_dtype(hidden.dtype))
        total = lse.new_zeros(())
        for tile, tile_lse in zip(rows.split(tile_size), lse.split(tile_size), strict=True):
            logits = transform.apply_(linear(hidden[tile], weight).to(lse.dtype))
            torch.logsumexp(logits, dim=1, out=tile_lse)
            total += (tile_lse - logits.gather(1, targets[tile, None]).squeeze(1)).sum()
        ctx.save_for_backward(hidden, weight, targets, rows, lse)
        ctx.tile_size, ctx.transform = tile_size, transform
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `hidden` and `weight`."""
        hidden, weight, targets, rows, lse = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if ctx.needs_input_grad[1] else None
        for tile, tile_lse in zip(rows.split(ctx.tile_size), lse.split(ctx.tile_size), strict=True):
            logits = ctx.transform.apply_(linear(hidden[tile], weight).to(lse.dtype))
            slope = ctx.transform.slope(logits)
            dlogits = logits.sub_(tile_lse[:, None]).exp_()
            dlogits.scatter_add_(1, targets[tile, None], dlogits.new_full((len(tile), 1), -1.0))
            dlogits = dlogits.mul_(slope * grad).to(hidden.dtype)
            grad_hidden[tile] = dlogits @ weight
            if grad_weight is not None:
                grad_weight += dlogits.T @ hidden[tile]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None
