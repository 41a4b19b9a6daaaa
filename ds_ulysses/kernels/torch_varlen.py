"""Flash attention that ships inside PyTorch, in its variable-length form. CUDA, fp16 and bf16, no softcap.

The aten ops are called, not `torch.nn.attention.varlen`, whose arguments change from release to release.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_ulysses.kernels.contract import FunctionalKernel, Mask, Request, Triple, flash_refusal


class TorchVarlenKernel(FunctionalKernel):
    name = "torch_varlen"
    device = "cuda"

    def _refusal(self, request: Request) -> str | None:
        return "it has no softcap" if request.softcap else flash_refusal(request)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        batch, length = q.shape[:2]
        flat = [x.flatten(0, 1) for x in (q, k, v)]  # [B, L, H, D] -> [B * L, H, D]
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *flat, *_bounds(q, k), 0.0, mask.causal, False, **_options(mask)
        )
        lse = lse.unflatten(1, (batch, length)).transpose(0, 1).contiguous()  # [H, B * L] -> [B, H, L]
        return out.unflatten(0, (batch, length)), lse.masked_fill_(lse == float("inf"), float("-inf"))

    def _gradients(self, dout: Tensor, qkv: Triple, out: Tensor, lse: Tensor, mask: Mask) -> Triple:
        q, k, v = qkv
        flat = [x.flatten(0, 1) for x in (dout, *qkv, out)]
        lse = torch.where(lse == float("-inf"), float("inf"), lse).transpose(0, 1).flatten(1).contiguous()
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *flat, lse, *_bounds(q, k), 0.0, mask.causal, *no_dropout, **_options(mask)
        )
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _options(mask: Mask) -> dict[str, float]:
    return {"scale": mask.scale, "window_size_left": mask.left, "window_size_right": mask.right}


def _bounds(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """cu_seqlens and max_seqlen of equal rows."""
    batch, num_queries, num_keys = q.shape[0], q.shape[1], k.shape[1]
    steps = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    return steps * num_queries, steps * num_keys, num_queries, num_keys
