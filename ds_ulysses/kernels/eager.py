"""Attention written out: any device, dtype, window and softcap. Slow and O(Lq * Lk) in memory.

Letters: B batch, q and k tokens, K KV heads, G query heads per KV head, D dim of queries and keys, E of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_ulysses.config import accumulation_dtype
from ds_ulysses.kernels.contract import Mask, Request, Softmax, Triple
from ds_ulysses.kernels.looping import LoopingKernel
from ds_ulysses.kernels.masks import visible


class EagerKernel(LoopingKernel):
    """The kernel that writes attention out."""

    name = "eager"
    any_value_dim = True

    def _refusal(self, request: Request) -> str | None:
        return None

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        scores, _ = _scores(q, k, mask)
        lse = torch.logsumexp(scores, dim=-1)
        out = torch.einsum("BKGqk,BkKE->BqKGE", _probabilities(scores, lse).to(v.dtype), v)
        return out.flatten(2, 3), lse.flatten(1, 2)

    def _gradients(self, dout: Tensor, qkv: Triple, softmax: Softmax, mask: Mask) -> Triple:
        (q, k, v), (out, lse) = qkv, softmax
        scores, tanh = _scores(q, k, mask)
        groups = (k.shape[2], q.shape[2] // k.shape[2])
        lse, dout, out = lse.unflatten(1, groups), dout.unflatten(2, groups), out.unflatten(2, groups)
        probabilities = _probabilities(scores, lse)
        delta = (dout.to(scores.dtype) * out).sum(-1).permute(0, 2, 3, 1)  # BKGq
        dprobabilities = torch.einsum("BqKGE,BkKE->BKGqk", dout, v).to(scores.dtype)
        dscores = probabilities * (dprobabilities - delta[..., None])
        if tanh is not None:
            dscores = dscores * (1 - tanh * tanh)
        dscores = (dscores * mask.scale).to(q.dtype)
        dq = torch.einsum("BKGqk,BkKD->BqKGD", dscores, k).flatten(2, 3)
        dk = torch.einsum("BKGqk,BqKGD->BkKD", dscores, q.unflatten(2, groups))
        return dq, dk, torch.einsum("BKGqk,BqKGE->BkKE", probabilities.to(dout.dtype), dout)


def _scores(q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, Tensor | None]:
    """Masked scores [B, K, G, q, k] in at least fp32, and the tanh of the softcap if there is one."""
    groups = (k.shape[2], q.shape[2] // k.shape[2])
    scores = torch.einsum("BqKGD,BkKD->BKGqk", q.unflatten(2, groups), k)
    scores = scores.to(accumulation_dtype(q.dtype)) * mask.scale
    tanh = None
    if mask.softcap:
        tanh = torch.tanh(scores / mask.softcap)
        scores = mask.softcap * tanh
    seen = visible(q.shape[1], k.shape[1], mask, q.device)
    return scores.masked_fill(~seen, float("-inf")), tanh


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), with zeros instead of NaN where a query sees nothing."""
    return torch.exp(scores - torch.where(lse == float("-inf"), 0, lse)[..., None])
