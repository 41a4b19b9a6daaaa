"""Attention sinks: a learned logit per head that takes part in the softmax and has no value.

Applied to a finished softmax they need nothing of the kernel: a sink s is one more block with output 0 and lse s,

    lse' = log(exp(lse) + exp(s))    out' = out * exp(lse - lse')    ds = -sum exp(s - lse') * (dout . out')

and out', lse' are what the backward of every kernel takes. Xiao et al., arXiv:2309.17453; learned as in GPT-OSS.

Shapes: B batch, L tokens, H heads of this rank, D head dim: out [B, L, H, D], lse [B, H, L], sinks [H].
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """Put the sinks into out and lse, in place. They have the dtype of lse."""
    if sinks is None:
        return
    total = torch.logaddexp(lse, sinks[:, None])
    out.mul_(torch.exp(lse - total).transpose(1, 2)[..., None])
    lse.copy_(total)


def sink_gradients(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the gradients [H] of the sinks, of these tokens only; all ranks' together are the gradient.

    Empty without sinks, as ops return no None.
    """
    if sinks is None:
        return lse.new_empty(0)
    delta = (dout.to(lse.dtype) * out).sum(-1).transpose(1, 2)
    return -(torch.exp(sinks[:, None] - lse) * delta).sum((0, 2))
