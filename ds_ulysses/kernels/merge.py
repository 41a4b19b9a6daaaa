"""Two softmaxes over different keys become one."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block's softmax to that of earlier blocks, in place; out [B, L, H, D] and lse [B, H, L], at least fp32.

    A weight is 1 where nothing was seen before and 0 where the block sees nothing, also where both are so.
    Milakov and Gimelshein, arXiv:1805.02867.
    """
    total = torch.logaddexp(lse, block_lse)
    weight = torch.exp(block_lse - torch.where(total == float("-inf"), 0, total))
    out.lerp_(block_out.to(out.dtype), weight.transpose(1, 2)[..., None])
    lse.copy_(total)
