"""Attention of one rank over the whole sequence, on the buffer that the exchange delivers.

Shapes: B batch, T tokens of the whole sequence, H and K local query and KV heads, D head dim.

    qkv   [T, B, (H + 2K) * D]    q, k and v side by side, as scatter_channels returns them
    out   [T, B, H * D]           as gather_channels takes it
    lse   [B, H, T]

q, k and v are views of the buffer and their gradients are written into one buffer of its shape, so nothing
is split or joined around the kernel. One opaque op with its own backward, like the exchanges around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ulysses.heads import HeadRun
from ds_ulysses.kernels import KERNELS, Mask


def local_attention(qkv: Tensor, runs: list[HeadRun], mask: Mask, documents: Tensor | None, kernel: str) -> Tensor:
    """Attend within each document. Differentiable; no communication.

    `qkv` [T, B, (H + 2K) * D]; `runs` are the rank's heads, see `HeadSplit.runs`; `documents` is an int tensor
    [N, 3] on the CPU of (row, start, stop), or None if each row is one document. Tokens in no document get
    output 0. Returns [T, B, H * D].
    """
    flat = [index for run in runs for index in run]
    out, _ = torch.ops.ds_ulysses.local_attention(
        qkv, documents, flat, [mask.left, mask.right], [mask.scale, mask.softcap], kernel
    )
    return out


class _Block(NamedTuple):
    """Index of one kernel call: rows, tokens, query heads and KV heads that share a document and a head run."""

    rows: slice
    tokens: slice
    q_heads: slice
    kv_heads: slice

    def of_q(self, x: Tensor) -> Tensor:
        return x[self.rows, self.tokens, self.q_heads]

    def of_kv(self, x: Tensor) -> Tensor:
        return x[self.rows, self.tokens, self.kv_heads]

    def of_lse(self, x: Tensor) -> Tensor:
        return x[self.rows, self.q_heads, self.tokens]


def _blocks(runs: list[int], documents: Tensor | None) -> Iterator[_Block]:
    rows = [(0, None, 0, None)] if documents is None else [(r, r + 1, a, b) for r, a, b in documents.tolist()]
    for first, last, start, stop in rows:
        for run in _head_runs(runs):
            q_heads, kv_heads = slice(run.q_start, run.q_stop), slice(run.kv_start, run.kv_stop)
            yield _Block(slice(first, last), slice(start, stop), q_heads, kv_heads)


def _head_runs(flat: list[int]) -> list[HeadRun]:
    return [HeadRun(*flat[i : i + 4]) for i in range(0, len(flat), 4)]


def _num_heads(runs: list[int]) -> tuple[int, int]:
    """Local query and KV heads."""
    return (runs[-3], runs[-1]) if runs else (0, 0)


def _mask(window: list[int], score: list[float]) -> Mask:
    return Mask(scale=score[0], left=window[0], right=window[1], softcap=score[1])


def _views(qkv: Tensor, runs: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, T, H, D], k and v [B, T, K, D] as views of the buffer."""
    num_heads, num_kv_heads = _num_heads(runs)
    heads = qkv.transpose(0, 1).unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=2)
    return q, k, v


@torch.library.custom_op("ds_ulysses::local_attention", mutates_args=())
def _local_attention(
    qkv: Tensor, documents: Tensor | None, runs: list[int], window: list[int], score: list[float], kernel: str
) -> tuple[Tensor, Tensor]:
    if not runs:
        return _empty(qkv, runs)
    mask = _mask(window, score)
    q, k, v = _views(qkv, runs)
    blocks = list(_blocks(runs, documents))
    if documents is None and len(blocks) == 1:
        out, lse = KERNELS[kernel].forward(q, k, v, mask)
        return out.transpose(0, 1).flatten(2).contiguous(), lse
    out, lse = _empty(qkv, runs)
    out_heads = out.zero_().transpose(0, 1).unflatten(-1, (q.shape[2], -1))
    lse.fill_(float("-inf"))
    for block in blocks:
        block_out, block_lse = KERNELS[kernel].forward(block.of_q(q), block.of_kv(k), block.of_kv(v), mask)
        block.of_q(out_heads).copy_(block_out)
        block.of_lse(lse).copy_(block_lse)
    return out, lse


@_local_attention.register_fake
def _(qkv: Tensor, documents: object, runs: list[int], *_: object) -> tuple[Tensor, Tensor]:
    return _empty(qkv, runs)


def _empty(qkv: Tensor, runs: list[int]) -> tuple[Tensor, Tensor]:
    """Uninitialised out [T, B, H * D] and lse [B, H, T]."""
    tokens, batch, channels = qkv.shape
    num_heads, num_kv_heads = _num_heads(runs)
    head_dim = channels // max(num_heads + 2 * num_kv_heads, 1)
    lse_dtype = torch.promote_types(qkv.dtype, torch.float32)
    lse = qkv.new_empty(batch, num_heads, tokens, dtype=lse_dtype)
    return qkv.new_empty(tokens, batch, num_heads * head_dim), lse


@torch.library.custom_op("ds_ulysses::local_attention_backward", mutates_args=())
def _local_attention_backward(
    dout: Tensor, saved: list[Tensor], documents: Tensor | None, runs: list[int], window: list[int],
    score: list[float], kernel: str,
) -> Tensor:  # fmt: skip
    qkv, out, lse = saved
    if not runs:
        return torch.zeros_like(qkv)
    mask = _mask(window, score)
    q, k, v = _views(qkv, runs)
    dqkv = torch.empty_like(qkv) if documents is None else torch.zeros_like(qkv)
    dq, dk, dv = _views(dqkv, runs)
    dout, out = (x.transpose(0, 1).unflatten(-1, (q.shape[2], -1)) for x in (dout, out))
    for block in _blocks(runs, documents):
        KERNELS[kernel].backward(
            block.of_q(dout), (block.of_q(q), block.of_kv(k), block.of_kv(v)), block.of_q(out),
            block.of_lse(lse).contiguous(), mask, (block.of_q(dq), block.of_kv(dk), block.of_kv(dv)),
        )  # fmt: skip
    return dqkv


@_local_attention_backward.register_fake
def _(dout: Tensor, saved: list[Tensor], *_: object) -> Tensor:
    return torch.empty_like(saved[0])


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    qkv, documents, ctx.runs, ctx.window, ctx.score, ctx.kernel = inputs
    ctx.save_for_backward(qkv, documents, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dout: Tensor, _dlse: object):  # type: ignore[no-untyped-def]
    qkv, documents, out, lse = ctx.saved_tensors
    dqkv = torch.ops.ds_ulysses.local_attention_backward(
        dout, [qkv, out, lse], documents, ctx.runs, ctx.window, ctx.score, ctx.kernel
    )
    return dqkv, None, None, None, None, None


_local_attention.register_autograd(_backward, setup_context=_keep)
