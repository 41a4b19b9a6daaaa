"""PyTorch's own CPU flash attention: fp64, fp32, bf16 and fp16, GQA without expansion, linear memory when causal.

Its traps: it crashes the process on zero-length inputs (which the base class keeps away), knows no window,
aligns causal masks top-left, and returns lse 0 instead of -inf for a query that sees nothing. A causal mask with more
keys than queries is computed in two parts, the keys that all queries see and the square that is left; any other needs
an additive mask of Lq x Lk.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ds_ulysses.kernels.contract import Mask, Request, Softmax, Triple
from ds_ulysses.kernels.looping import LoopingKernel
from ds_ulysses.kernels.masks import empty_rows, visible
from ds_ulysses.kernels.merge import merge

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuFlashKernel(LoopingKernel):
    """The kernel of PyTorch's own CPU flash attention."""

    name = "cpu_flash"
    device = "cpu"

    def _refusal(self, request: Request) -> str | None:
        return "it has no softcap" if request.softcap else None

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        if ahead := _keys_ahead(q, k, mask):
            out, lse = self._forward(q, k[:, :ahead], v[:, :ahead], replace(mask, right=-1))
            square_out, square_lse = self._forward(q, k[:, ahead:], v[:, ahead:], mask)
            total = out.to(lse.dtype)
            merge(total, lse, square_out, square_lse)
            return total.to(q.dtype), lse
        before, after = empty_rows(q.shape[1], k.shape[1], mask)
        causal, bias = _mask_arguments(q, k, mask)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = _forward(q, k, v, 0.0, causal, attn_mask=bias, scale=mask.scale)
        lse = lse.contiguous()
        if before or after:
            lse[..., :before] = float("-inf")
            lse[..., lse.shape[-1] - after :] = float("-inf")
        return out.transpose(1, 2), lse

    def _gradients(self, dout: Tensor, qkv: Triple, softmax: Softmax, mask: Mask) -> Triple:
        (q, k, v), (out, lse) = qkv, softmax
        if ahead := _keys_ahead(q, k, mask):
            seen = self._gradients(dout, (q, k[:, :ahead], v[:, :ahead]), softmax, replace(mask, right=-1))
            square = self._gradients(dout, (q, k[:, ahead:], v[:, ahead:]), softmax, mask)
            dk, dv = (torch.cat(parts, dim=1) for parts in zip(seen[1:], square[1:], strict=True))
            return seen[0] + square[0], dk, dv
        causal, bias = _mask_arguments(q, k, mask)
        if any(empty_rows(q.shape[1], k.shape[1], mask)):
            # exp(-inf - lse) must stay 0 on empty rows: any finite lse does that, -inf would give NaN.
            lse = torch.where(lse == float("-inf"), 0, lse)
        tensors = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        dq, dk, dv = _backward(*tensors, lse, 0.0, causal, attn_mask=bias, scale=mask.scale)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _keys_ahead(q: Tensor, k: Tensor, mask: Mask) -> int:
    """Keys that every query of a causal mask sees, if there are more keys than queries."""
    return max(k.shape[1] - q.shape[1], 0) if mask.causal else 0


def _mask_arguments(q: Tensor, k: Tensor, mask: Mask) -> tuple[bool, Tensor | None]:
    """The kernel's `is_causal` and its additive mask [Lq, Lk], which is built only where it is needed."""
    if mask.causal and q.shape[1] == k.shape[1]:
        return True, None
    if mask.left < 0 and mask.right < 0:
        return False, None
    seen = visible(q.shape[1], k.shape[1], mask, q.device)
    return False, torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, float("-inf"))
