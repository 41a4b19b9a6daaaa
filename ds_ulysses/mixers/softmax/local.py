"""Attention of one rank over the whole sequence, on the buffer that the exchange delivers.

Shapes: B batch, T tokens of the whole sequence, H and K local query and KV heads, D dim of queries and keys, E of
values.

    qkv   [T, B, H * D + K * (D + E)]    q, k and v side by side, as scatter_channels returns them
    out   [T, B, H * E]                  as gather_channels takes it
    lse   [B, H, T]

q, k and v are views of the buffer and their gradients are written into one buffer of its shape, so nothing
is split or joined around the kernel. One opaque op with its own backward, like the exchanges around it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_ulysses.config import accumulation_dtype
from ds_ulysses.mixers.softmax.blocks import Block, attend_once, blocks, heads, queries_keys_values, write_gradients
from ds_ulysses.mixers.softmax.call import Call, decode
from ds_ulysses.mixers.softmax.sinks import apply_sinks, sink_gradients
from ds_ulysses.placement import plan_gathered


def local_attention(qkv: Tensor, documents: Tensor | None, sinks: Tensor | None, call: Call) -> Tensor:
    """Attend within each document. Differentiable; no communication.

    `qkv` as above; `documents` is an int32 tensor [N, 3] on the CPU of (row, start, stop), or None if each
    row is one document; `sinks` [H] or None. Tokens in no document get output 0. Returns [T, B, H * E].
    """
    out, _ = torch.ops.ds_ulysses.local_attention(qkv, documents, sinks, call.encode())
    return out


def _blocks(qkv: Tensor, documents: Tensor | None, call: Call) -> list[Block]:
    """The kernel calls: one for each document and head run."""
    pairs = plan_gathered(call.geometry(qkv, documents), 0)
    return list(blocks(pairs, call.runs, call, packed=documents is not None, joined=False))


@torch.library.custom_op("ds_ulysses::local_attention", mutates_args=())
def _local_attention(
    qkv: Tensor, documents: Tensor | None, sinks: Tensor | None, settings: str
) -> tuple[Tensor, Tensor]:
    call = decode(settings)
    q, k, v = queries_keys_values(qkv, call.local_heads, call.dims)
    out, lse = attend_once(q, [(block, k, v) for block in _blocks(qkv, documents, call)], call)
    apply_sinks(heads(out, call.value_dim), lse, sinks)
    return out, lse


@_local_attention.register_fake
def _(qkv: Tensor, documents: object, sinks: object, settings: str) -> tuple[Tensor, Tensor]:
    return _empty(qkv, decode(settings))


def _empty(qkv: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Uninitialised out [T, B, H * E] and lse [B, H, T]."""
    tokens, batch, _ = qkv.shape
    num_heads, _ = call.local_heads
    lse = qkv.new_empty(batch, num_heads, tokens, dtype=accumulation_dtype(qkv.dtype))
    return qkv.new_empty(tokens, batch, num_heads * call.value_dim), lse


@torch.library.custom_op("ds_ulysses::local_attention_backward", mutates_args=())
def _local_attention_backward(
    dout: Tensor, saved: list[Tensor], documents: Tensor | None, sinks: Tensor | None, settings: str
) -> tuple[Tensor, Tensor]:
    (qkv, out, lse), call = saved, decode(settings)
    dqkv = torch.empty_like(qkv) if documents is None else torch.zeros_like(qkv)
    dout, out = (heads(x, call.value_dim) for x in (dout, out))
    views, grads = (queries_keys_values(x, call.local_heads, call.dims) for x in (qkv, dqkv))
    for block in _blocks(qkv, documents, call):
        write_gradients(block, dout, views, (out, lse), grads, call)
    return dqkv, sink_gradients(dout, out, lse, sinks)


@_local_attention_backward.register_fake
def _(
    dout: Tensor, saved: list[Tensor], documents: object, sinks: Tensor | None, settings: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(saved[0]), saved[2].new_empty(0 if sinks is None else sinks.shape)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)  # of lse and what else is kept: there are none
    qkv, documents, sinks, ctx.settings = inputs
    ctx.save_for_backward(qkv, documents, sinks, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dout: Tensor, _dlse: object):  # type: ignore[no-untyped-def]
    qkv, documents, sinks, out, lse = ctx.saved_tensors
    dqkv, dsinks = torch.ops.ds_ulysses.local_attention_backward(dout, [qkv, out, lse], documents, sinks, ctx.settings)
    return dqkv, None, None if sinks is None else dsinks, None


_local_attention.register_autograd(_backward, setup_context=_keep)
