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
from ds_ulysses.mixers.softmax.buffers import heads, queries_keys_values
from ds_ulysses.mixers.softmax.call import call_of, decode, local_heads
from ds_ulysses.mixers.softmax.kernel_calls import attend_once
from ds_ulysses.mixers.softmax.sinks import apply_sinks, sink_gradients
from ds_ulysses.placement import Placement


def local_attention(qkv: Tensor, placement: Placement, sinks: Tensor | None, settings: str) -> Tensor:
    """Attend within each document. Differentiable; no communication.

    `qkv` as above; `sinks` [H] or None. Tokens in no document get output 0. Returns [T, B, H * E].
    """
    out, _ = torch.ops.ds_ulysses.local_attention(qkv, placement, sinks, settings)
    return out


@torch.library.custom_op("ds_ulysses::local_attention", mutates_args=())
def _local_attention(qkv: Tensor, placement: Placement, sinks: Tensor | None, settings: str) -> tuple[Tensor, Tensor]:
    placement.refuse_others(qkv.shape[1], qkv.shape[0])
    call = call_of(placement, settings)
    q, k, v = queries_keys_values(qkv, call.local_heads, call.dims)
    todo = [(kernel_call, k, v) for kernel_call in call.local_calls]
    out, lse = attend_once(q, todo, call.kernel, call.settings.value_dim)
    apply_sinks(heads(out, call.settings.value_dim), lse, sinks)
    return out, lse


@_local_attention.register_fake
def _(qkv: Tensor, placement: Placement, sinks: object, settings: str) -> tuple[Tensor, Tensor]:
    (num_heads, _), value_dim = local_heads(placement, decode(settings)), decode(settings).value_dim
    tokens, batch, _ = qkv.shape
    lse = qkv.new_empty(batch, num_heads, tokens, dtype=accumulation_dtype(qkv.dtype))
    return qkv.new_empty(tokens, batch, num_heads * value_dim), lse


@torch.library.custom_op("ds_ulysses::local_attention_backward", mutates_args=())
def _local_attention_backward(
    dout: Tensor, saved: list[Tensor], placement: Placement, sinks: Tensor | None, settings: str
) -> tuple[Tensor, Tensor]:
    (qkv, out, lse), call = saved, call_of(placement, settings)
    dqkv = torch.zeros_like(qkv) if placement.packed else torch.empty_like(qkv)
    dout, out = (heads(x, call.settings.value_dim) for x in (dout, out))
    views, grads = (queries_keys_values(x, call.local_heads, call.dims) for x in (qkv, dqkv))
    for kernel_call in call.local_calls:
        kernel_call.write_gradients(call.kernel, dout, views, (out, lse), grads)
    return dqkv, sink_gradients(dout, out, lse, sinks)


@_local_attention_backward.register_fake
def _(
    dout: Tensor, saved: list[Tensor], placement: object, sinks: Tensor | None, settings: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(saved[0]), saved[2].new_empty(0 if sinks is None else sinks.shape)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)  # of lse and what else is kept: there are none
    qkv, ctx.placement, sinks, ctx.settings = inputs
    ctx.save_for_backward(qkv, sinks, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dout: Tensor, _dlse: object):  # type: ignore[no-untyped-def]
    qkv, sinks, *output = ctx.saved_tensors
    dqkv, dsinks = torch.ops.ds_ulysses.local_attention_backward(
        dout, [qkv, *output], ctx.placement, sinks, ctx.settings
    )
    return dqkv, None, None if sinks is None else dsinks, None


_local_attention.register_autograd(_backward, setup_context=_keep)
