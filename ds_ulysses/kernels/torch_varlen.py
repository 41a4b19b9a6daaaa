"""Flash attention that ships inside PyTorch, through its variable-length op. CUDA, fp16 and bf16, no softcap."""

from __future__ import annotations

import torch
import torch.nn.attention.varlen  # registers torch.ops.torch_attn
from torch import Tensor

from ds_ulysses.kernels.contract import Kernel, Mask, Request, Triple


class TorchVarlenKernel(Kernel):
    name = "torch_varlen"

    def refusal(self, request: Request) -> str | None:
        if request.device != "cuda":
            return f"it runs on CUDA, not on {request.device}"
        if request.dtype not in (torch.float16, torch.bfloat16):
            return f"it has no {request.dtype}"
        if request.head_dim > 256 or request.head_dim % 8:
            return f"it has no head dim {request.head_dim}"
        return "it has no softcap" if request.softcap else None

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        batch, length = q.shape[:2]
        flat = [x.flatten(0, 1) for x in (q, k, v)]  # [B, L, H, D] -> [B * L, H, D]
        out, lse, _ = torch.ops.torch_attn._varlen_attn(
            *flat, *_bounds(q, k), mask.causal, mask.scale, [mask.left, mask.right], enable_gqa=True
        )
        lse = lse.unflatten(1, (batch, length)).transpose(0, 1).contiguous()  # [H, B * L] -> [B, H, L]
        return out.unflatten(0, (batch, length)), lse.masked_fill_(lse == float("inf"), float("-inf"))

    def _backward(self, dout: Tensor, qkv: Triple, out: Tensor, lse: Tensor, mask: Mask, grads: Triple) -> None:
        q, k, _ = qkv
        flat = [x.flatten(0, 1) for x in (dout, *qkv, out)]
        lse = torch.where(lse == float("-inf"), float("inf"), lse).transpose(0, 1).flatten(1).contiguous()
        unused_rng = torch.empty(2, dtype=torch.uint64, device=q.device)
        found = torch.ops.torch_attn._varlen_attn_backward(
            *flat, lse, *_bounds(q, k), mask.causal, unused_rng, mask.scale, [mask.left, mask.right]
        )
        for grad, value in zip(grads, found, strict=True):
            grad.copy_(value.view(grad.shape))


def _bounds(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """cu_seqlens and max_seqlen of equal rows."""
    batch, num_queries, num_keys = q.shape[0], q.shape[1], k.shape[1]
    steps = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    return steps * num_queries, steps * num_keys, num_queries, num_keys
