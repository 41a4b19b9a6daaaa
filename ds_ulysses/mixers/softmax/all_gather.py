"""Attention to gathered keys: every rank gets all keys and values, some heads at a time. For short sequences.

Dubey et al., "The Llama 3 Herd of Models" (arXiv:2407.21783), section 3.3.2, with KV heads in stages: the next stage
travels while this one is computed, and the gradient of the last one is summed and scattered meanwhile. Each query meets
all its keys in one kernel call, so any mask that the kernel knows will do and nothing is merged.

Shapes: B batch, n local tokens, T = n * P tokens of the whole sequence, H and K query and KV heads, D dim of
queries and keys, E of values.

    q        [n, B, H * D]
    out      [n, B, H * E]
    kv       [n, B, K * (D + E)], keys and values side by side
    lse      [B, H, n]
    stage    [T, B, k * (D + E)] of k KV heads, in the order of the row
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ds_ulysses.comm import Pending, one_ahead, start_all_gather, start_reduce_scatter
from ds_ulysses.config import Direction, accumulation_dtype, wire_dtype
from ds_ulysses.mixers.softmax.buffers import heads, keys_and_values, keys_and_values_of_shard
from ds_ulysses.mixers.softmax.call import Call, Settings, Stage, call_of, decode
from ds_ulysses.mixers.softmax.sinks import apply_sinks, sink_gradients
from ds_ulysses.placement import Placement, Range, held_by, token_index


def all_gather_attention(
    q: Tensor, k: Tensor, v: Tensor, placement: Placement, sinks: Tensor | None, settings: str
) -> Tensor:
    """Attend to keys that are gathered: q [B, n, H, D], k [B, n, K, D], v [B, n, K, E] -> [B, n, H, E].

    `sinks` [H] or None.
    """
    value_dim = v.shape[3]
    q, kv = q.flatten(2).transpose(0, 1), keys_and_values_of_shard(k, v)
    out, _ = torch.ops.ds_ulysses.all_gather_attention(q, kv, placement, sinks, settings)
    return heads(out, value_dim)


@torch.library.custom_op("ds_ulysses::all_gather_attention", mutates_args=())
def _all_gather_attention(
    q: Tensor, kv: Tensor, placement: Placement, sinks: Tensor | None, settings: str
) -> tuple[Tensor, Tensor]:
    placement.refuse_others(q.shape[1], q.shape[0] * placement.ring_size)
    call = call_of(placement, settings)
    buffer, lse = _empty(q, call.settings)
    out, q = heads(buffer.zero_(), call.settings.value_dim), heads(q, call.settings.head_dim)
    lse.fill_(float("-inf"))
    for stage, gathered in _gathered(kv, call, "forward"):
        k, v = keys_and_values(gathered, call.dims)
        for kernel_call in stage.calls:
            kernel_call.add_softmax(call.kernel, (q, k, v), out, lse)
    apply_sinks(out, lse, sinks)
    return buffer, lse


@_all_gather_attention.register_fake
def _(q: Tensor, kv: object, placement: object, sinks: object, settings: str) -> tuple[Tensor, Tensor]:
    return _empty(q, decode(settings))


def _empty(q: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Uninitialised out and lse."""
    num_heads = settings.num_heads
    lse = q.new_empty(q.shape[1], num_heads, q.shape[0], dtype=accumulation_dtype(q.dtype))
    return q.new_empty(q.shape[0], q.shape[1], num_heads * settings.value_dim), lse


@torch.library.custom_op("ds_ulysses::all_gather_attention_backward", mutates_args=())
def _all_gather_attention_backward(
    dout: Tensor, saved: list[Tensor], placement: Placement, sinks: Tensor | None, settings: str
) -> tuple[Tensor, Tensor, Tensor]:
    (q, kv, out, lse), call = saved, call_of(placement, settings)
    dq_buffer, dkv = (x.new_zeros(x.shape) for x in (q, kv))
    q, dq = (heads(x, call.settings.head_dim) for x in (q, dq_buffer))
    out, dout = (heads(x, call.settings.value_dim) for x in (out, dout))

    def computed() -> Iterator[Tensor]:
        for stage, gathered in _gathered(kv, call, "backward"):
            dstage = torch.zeros_like(gathered, dtype=lse.dtype)
            (k, v), (dk, dv) = (keys_and_values(x, call.dims) for x in (gathered, dstage))
            for kernel_call in stage.calls:
                grads = kernel_call.gradients(call.kernel, dout, (q, k, v), (out, lse))
                kernel_call.of_q(dq).add_(grads[0])
                kernel_call.of_kv(dk).add_(grads[1])
                kernel_call.of_kv(dv).add_(grads[2])
            yield dstage

    for stage, shard in zip(call.stages, _scattered(computed(), call), strict=True):
        columns = _columns(dkv, stage.kv_heads, call)
        for column, gradient in zip(columns, shard.split([x.shape[-1] for x in columns], dim=-1), strict=True):
            column.copy_(gradient)
    return dq_buffer, dkv, sink_gradients(dout, out, lse, sinks)


@_all_gather_attention_backward.register_fake
def _(
    dout: Tensor, saved: list[Tensor], placement: object, sinks: Tensor | None, settings: str
) -> tuple[Tensor, Tensor, Tensor]:
    q, kv, _, lse = saved
    return q.new_empty(q.shape), kv.new_empty(kv.shape), lse.new_empty(0 if sinks is None else sinks.shape)


def _gathered(kv: Tensor, call: Call, direction: Direction) -> Iterator[tuple[Stage, Tensor]]:
    """Each stage, and its keys and values [T, B, k * (D + E)]."""
    packed = (torch.cat(_columns(kv, stage.kv_heads, call), dim=-1) for stage in call.stages)
    started = (start_all_gather(columns, call.placement.ring_group, direction) for columns in packed)
    for stage, buffer in zip(call.stages, one_ahead(started), strict=True):
        yield stage, _reorder(buffer, call.placement, to_row=True)


def _scattered(gradients: Iterator[Tensor], call: Call) -> Iterator[Tensor]:
    """Sum the gradient of each stage over the ranks, [T, B, k * (D + E)]; that of this rank's tokens comes back."""
    placement = call.placement

    def started() -> Iterator[Pending[Tensor]]:
        for gradient in gradients:
            wire = _reorder(gradient, placement, to_row=False).to(wire_dtype(placement.mesh.grad_dtype, gradient.dtype))
            yield start_reduce_scatter(wire, placement.ring_group, "backward")

    return one_ahead(started())


def _columns(kv: Tensor, part: Range, call: Call) -> tuple[Tensor, Tensor]:
    """Keys and values of some KV heads, views."""
    keys, values = kv.split([call.settings.num_kv_heads * dim for dim in call.dims], dim=-1)
    (start, stop), (head_dim, value_dim) = part, call.dims
    return keys[..., start * head_dim : stop * head_dim], values[..., start * value_dim : stop * value_dim]


def _reorder(x: Tensor, placement: Placement, to_row: bool) -> Tensor:
    """From the order of the ranks to that of the row, or back; x [T, B, channels]."""
    if placement.mesh.layout == "contiguous":
        return x
    orders = placement.derived(("orders", x.device), lambda: _orders(placement, x.device))
    index = orders[0 if to_row else 1]
    if index.shape[1] == 1:
        return x.index_select(0, index[:, 0])
    return x[index, torch.arange(x.shape[1], device=x.device)]


def _orders(placement: Placement, device: torch.device) -> tuple[Tensor, Tensor]:
    """[T, rows] each: where in the order of the ranks the tokens of the row are, and the inverse."""
    by_rank = [token_index(held, placement.num_rows) for held in held_by(placement.geometry())]
    tokens = torch.from_numpy(np.concatenate(by_rank))
    return tokens.argsort(dim=0).to(device), tokens.to(device)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)  # of lse and what else is kept: there are none
    q, kv, ctx.placement, sinks, ctx.settings = inputs
    ctx.save_for_backward(q, kv, sinks, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dout: Tensor, _dlse: object):  # type: ignore[no-untyped-def]
    q, kv, sinks, *output = ctx.saved_tensors
    dq, dkv, dsinks = torch.ops.ds_ulysses.all_gather_attention_backward(
        dout, [q, kv, *output], ctx.placement, sinks, ctx.settings
    )
    return dq, dkv, None, None if sinks is None else dsinks, None


_all_gather_attention.register_autograd(_backward, setup_context=_keep)
