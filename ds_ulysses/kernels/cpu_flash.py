"""PyTorch's own CPU flash attention: fp64, fp32, bf16 and fp16, GQA without expansion, linear memory when causal.

Its traps: it crashes the process on zero-length inputs (which the base class keeps away), knows no window,
aligns causal masks top-left, and returns lse 0 instead of -inf for a query that sees nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_ulysses.kernels.contract import Kernel, Mask, Request, Triple, empty_rows, visible

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuFlashKernel(Kernel):
    name = "cpu_flash"
    device = "cpu"

    def _refusal(self, request: Request) -> str | None:
        return "it has no softcap" if request.softcap else None

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        before, after = empty_rows(q.shape[1], k.shape[1], mask)
        causal, bias = _mask_arguments(q, k, mask)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = _forward(q, k, v, 0.0, causal, attn_mask=bias, scale=mask.scale)
        lse = lse.contiguous()
        lse[..., :before] = float("-inf")
        lse[..., lse.shape[-1] - after :] = float("-inf")
        return out.transpose(1, 2), lse

    def _backward(self, dout: Tensor, qkv: Triple, out: Tensor, lse: Tensor, mask: Mask, grads: Triple) -> None:
        q, k, v = qkv
        causal, bias = _mask_arguments(q, k, mask)
        if any(empty_rows(q.shape[1], k.shape[1], mask)):
            # exp(-inf - lse) must stay 0 on empty rows: any finite lse does that, -inf would give NaN.
            lse = torch.where(lse == float("-inf"), 0, lse)
        tensors = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        found = _backward(*tensors, lse, 0.0, causal, attn_mask=bias, scale=mask.scale)
        for grad, value in zip(grads, found, strict=True):
            grad.copy_(value.transpose(1, 2))


def _mask_arguments(q: Tensor, k: Tensor, mask: Mask) -> tuple[bool, Tensor | None]:
    """The kernel's `is_causal` and its additive mask [Lq, Lk], which is built only where it is needed."""
    if mask.causal and q.shape[1] == k.shape[1]:
        return True, None
    if mask.left < 0 and mask.right < 0:
        return False, None
    seen = visible(q.shape[1], k.shape[1], mask, q.device)
    return False, torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, float("-inf"))
