"""Token-exact loss: one mean over all supervised tokens, whatever the sharding, batching and accumulation.

Shapes: N tokens of this shard, H hidden size, V vocabulary.

    loss = sum over all ranks of -log p(target) / number of targets on all ranks

Each rank differentiates its own part of the sum only. What DeepSpeed divides by afterwards is undone by
`StepNormalizer.factor`; the number of targets of the *whole optimizer step*, which no single micro-batch knows,
is put right once the last one has been seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_ulysses.comm import sum_over_world
from ds_ulysses.config import IGNORE_INDEX
from ds_ulysses.loss.balance import Penalty, Routing, balance


class StepNormalizer:
    """The division of an optimizer step's gradient by the supervised tokens of all its micro-batches and ranks.

    The first micro-batch sets a reference count by which all are divided as they come; `close` returns what the
    accumulated gradient must then be multiplied by, so that the reference cancels out.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        """Undoes the division by the reducer. 1: gradients summed over ranks are those of one process."""
        self._reference: Tensor | None = None
        self._total: Tensor | None = None
        self._num_micro_batches = 0

    def weight(self, num_targets: Tensor, num_tokens: Tensor) -> Tensor:
        """Return the weight of a micro-batch's gradient; called as its backward begins.

        `num_targets` and `num_tokens` (0-dim) count supervised and all tokens over all ranks. The latter is the
        reference if the first micro-batch has no target at all.
        """
        if self._reference is None or self._total is None:
            self._reference = torch.where(num_targets > 0, num_targets, num_tokens)
            self._total = torch.zeros_like(num_targets)
        self._total = self._total + num_targets
        self._num_micro_batches += 1
        return self.factor / self._reference

    def close(self) -> Tensor | None:
        """End the optimizer step. Returns the factor that the accumulated gradient lacks; None if it is 1."""
        reference, total, num_micro_batches = self._reference, self._total, self._num_micro_batches
        self._reference, self._total, self._num_micro_batches = None, None, 0
        if num_micro_batches < 2 or reference is None or total is None:
            return None
        return reference / total.clamp(min=1)


@torch.compiler.disable
def causal_lm_loss(
    local_sum: Tensor, targets: Tensor, normalizer: StepNormalizer, routing: Routing | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the mean over all ranks' targets, equal on every rank; its gradient is this rank's part. 1 all-reduce.

    `local_sum` (0-dim): sum of the token losses of this shard. `routing`: what its tokens did in a mixture of experts,
    whose balancing loss is added. No target anywhere: loss 0 and gradients 0. Returns the loss, and the balancing loss.
    """
    own = [local_sum.detach(), (targets != IGNORE_INDEX).sum(), targets.new_tensor(targets.numel())]
    probabilities = None
    if routing is not None:
        probabilities = routing.probabilities
        own += [routing.num_tokens, *routing.assigned, *probabilities.detach()]
    total = sum_over_world(torch.stack([x.double() for x in own]))
    penalty = None if routing is None else balance(total[3:], routing.coefficient)
    mean, auxiliary = _GlobalMean.apply(local_sum, probabilities, total[:3], penalty, normalizer)
    return mean, auxiliary


class _GlobalMean(torch.autograd.Function):
    """From this rank's sums and those of all ranks to the loss of all; each rank differentiates its own part."""

    @staticmethod
    def forward(
        ctx: Any,
        local_sum: Tensor,
        probabilities: Tensor | None,
        total: Tensor,
        penalty: Penalty | None,
        normalizer: StepNormalizer,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss, and the balancing loss."""
        loss_sum, num_targets, num_tokens = total.unbind()
        ctx.normalizer = normalizer
        ctx.save_for_backward(num_targets, num_tokens, None if penalty is None else penalty.gradient)
        mean = loss_sum / num_targets.clamp(min=1)
        if penalty is None:
            return mean.to(local_sum.dtype), None
        auxiliary = penalty.loss.to(local_sum.dtype)
        ctx.mark_non_differentiable(auxiliary)
        return (mean + penalty.weighted * (num_targets > 0)).to(local_sum.dtype), auxiliary

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _auxiliary: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of this rank's sum and probabilities."""
        num_targets, num_tokens, dprobabilities = ctx.saved_tensors
        weight = grad * ctx.normalizer.weight(num_targets, num_tokens)
        if dprobabilities is not None:
            # A micro-batch counts by its targets, its balancing loss too.
            dprobabilities = (dprobabilities * weight * num_targets).float()
        return weight.to(grad.dtype), dprobabilities, None, None, None
