"""Flash attention that ships inside PyTorch, in its variable-length form. CUDA, fp16 and bf16, no softcap.

The aten ops are called, not `torch.nn.attention.varlen`, whose arguments change from release to release. Rows of a
batch are segments like any other: [B, L, H, D] -> [B * L, H, D].
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_ulysses.kernels.contract import Kernel, Mask, Request, Softmax, Triple
from ds_ulysses.kernels.flash_attn import flash_refusal
from ds_ulysses.kernels.segments import Segments

Bounds = tuple[Tensor, Tensor, int, int]
"""cu_seqlens and the longest segment, each of queries and keys."""


class TorchVarlenKernel(Kernel):
    """The kernel of the variable-length flash attention that ships inside PyTorch."""

    name = "torch_varlen"
    device = "cuda"

    def _refusal(self, request: Request) -> str | None:
        return "it has no softcap" if request.softcap else flash_refusal(request)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, segments: Segments | None) -> tuple[Tensor, Tensor]:
        batch, length = q.shape[:2]
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *flat, *_bounds(q, k, segments), 0.0, mask.causal, False, **_options(mask)
        )
        lse = lse.unflatten(1, (batch, length)).transpose(0, 1).contiguous()  # [H, B * L] -> [B, H, L]
        return out.unflatten(0, (batch, length)), lse.masked_fill_(lse == float("inf"), float("-inf"))

    def _write_gradients(
        self, dout: Tensor, qkv: Triple, softmax: Softmax, mask: Mask, grads: Triple, segments: Segments | None
    ) -> None:
        for grad, value in zip(grads, self._return_gradients(dout, qkv, softmax, mask, segments), strict=True):
            grad.copy_(value)

    def _return_gradients(
        self, dout: Tensor, qkv: Triple, softmax: Softmax, mask: Mask, segments: Segments | None
    ) -> Triple:
        (q, k, v), (out, lse) = qkv, softmax
        flat = [x.flatten(0, 1) for x in (dout, q, k, v, out)]
        lse = torch.where(lse == float("-inf"), float("inf"), lse).transpose(0, 1).flatten(1).contiguous()
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *flat, lse, *_bounds(q, k, segments), 0.0, mask.causal, *no_dropout, **_options(mask)
        )
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _options(mask: Mask) -> dict[str, float]:
    return {"scale": mask.scale, "window_size_left": mask.left, "window_size_right": mask.right}


def _bounds(q: Tensor, k: Tensor, segments: Segments | None) -> Bounds:
    """Of the table, or of equal rows."""
    if segments is not None:
        return *segments.cu_seqlens(q.device), segments.max_q, segments.max_k
    batch, num_queries, num_keys = q.shape[0], q.shape[1], k.shape[1]
    steps = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    return steps * num_queries, steps * num_keys, num_queries, num_keys
