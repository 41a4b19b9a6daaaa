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
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ds_ulysses.comm import Pending, one_ahead, start_all_gather, start_reduce_scatter
from ds_ulysses.config import Direction, accumulation_dtype, wire_dtype
from ds_ulysses.mixers.softmax.blocks import (
    Block,
    block_gradients,
    blocks,
    heads,
    keys_and_values,
    keys_and_values_of_shard,
    write_softmax,
)
from ds_ulysses.mixers.softmax.call import Call, decode
from ds_ulysses.mixers.softmax.sinks import apply_sinks, sink_gradients
from ds_ulysses.placement import Geometry, HeadRun, Range, held_by, plan_gathered, stages, token_index


def all_gather_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, sinks: Tensor | None, call: Call
) -> Tensor:
    """q [B, n, H, D], k [B, n, K, D], v [B, n, K, E] -> [B, n, H, E]; the others as in `local_attention`."""
    q, kv = q.flatten(2).transpose(0, 1), keys_and_values_of_shard(k, v)
    out, _ = torch.ops.ds_ulysses.all_gather_attention(q, kv, documents, sinks, call.encode())
    return heads(out, call.value_dim)


@torch.library.custom_op("ds_ulysses::all_gather_attention", mutates_args=())
def _all_gather_attention(
    q: Tensor, kv: Tensor, documents: Tensor | None, sinks: Tensor | None, settings: str
) -> tuple[Tensor, Tensor]:
    call = decode(settings)
    geometry = call.geometry(q, documents)
    buffer, lse = _empty(q, call)
    out, q = heads(buffer.zero_(), call.value_dim), heads(q, call.head_dim)
    lse.fill_(float("-inf"))
    for part, stage in _gathered(kv, geometry, call, "forward"):
        k, v = keys_and_values(stage, call.dims)
        for block in _blocks(part, geometry, call):
            write_softmax(block, (q, k, v), out, lse, call)
    apply_sinks(out, lse, sinks)
    return buffer, lse


@_all_gather_attention.register_fake
def _(q: Tensor, kv: object, documents: object, sinks: object, settings: str) -> tuple[Tensor, Tensor]:
    return _empty(q, decode(settings))


def _empty(q: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Uninitialised out and lse."""
    lse = q.new_empty(q.shape[1], call.num_heads, q.shape[0], dtype=accumulation_dtype(q.dtype))
    return q.new_empty(q.shape[0], q.shape[1], call.num_heads * call.value_dim), lse


@torch.library.custom_op("ds_ulysses::all_gather_attention_backward", mutates_args=())
def _all_gather_attention_backward(
    dout: Tensor, saved: list[Tensor], documents: Tensor | None, sinks: Tensor | None, settings: str
) -> tuple[Tensor, Tensor, Tensor]:
    (q, kv, out, lse), call = saved, decode(settings)
    geometry = call.geometry(q, documents)
    dq_buffer, dkv = (x.new_zeros(x.shape) for x in (q, kv))
    q, dq = (heads(x, call.head_dim) for x in (q, dq_buffer))
    out, dout = (heads(x, call.value_dim) for x in (out, dout))

    def computed() -> Iterator[Tensor]:
        for part, stage in _gathered(kv, geometry, call, "backward"):
            dstage = torch.zeros_like(stage, dtype=lse.dtype)
            (k, v), (dk, dv) = (keys_and_values(x, call.dims) for x in (stage, dstage))
            for block in _blocks(part, geometry, call):
                grads = block_gradients(block, dout, (q, k, v), out, lse, call)
                block.of_q(dq).copy_(grads[0])
                block.of_kv(dk).add_(grads[1])
                block.of_kv(dv).add_(grads[2])
            yield dstage

    for part, shard in zip(stages(call.num_kv_heads), _scattered(computed(), geometry, call), strict=True):
        columns = _columns(dkv, part, call)
        for column, gradient in zip(columns, shard.split([x.shape[-1] for x in columns], dim=-1), strict=True):
            column.copy_(gradient)
    return dq_buffer, dkv, sink_gradients(dout, out, lse, sinks)


@_all_gather_attention_backward.register_fake
def _(
    dout: Tensor, saved: list[Tensor], documents: object, sinks: Tensor | None, settings: str
) -> tuple[Tensor, Tensor, Tensor]:
    q, kv, _, lse = saved
    return q.new_empty(q.shape), kv.new_empty(kv.shape), lse.new_empty(0 if sinks is None else sinks.shape)


def _gathered(kv: Tensor, geometry: Geometry, call: Call, direction: Direction) -> Iterator[tuple[Range, Tensor]]:
    """KV heads of each stage, and their keys and values [T, B, k * (D + E)]."""
    parts = stages(call.num_kv_heads)
    packed = (torch.cat(_columns(kv, part, call), dim=-1) for part in parts)
    started = (start_all_gather(columns, call.place.ring_group, direction) for columns in packed)
    for part, buffer in zip(parts, one_ahead(started), strict=True):
        yield part, _reorder(buffer, geometry, to_row=True)


def _scattered(gradients: Iterator[Tensor], geometry: Geometry, call: Call) -> Iterator[Tensor]:
    """Sum the gradient of each stage over the ranks, [T, B, k * (D + E)]; that of this rank's tokens comes back."""

    def started() -> Iterator[Pending[Tensor]]:
        for gradient in gradients:
            wire = _reorder(gradient, geometry, to_row=False).to(wire_dtype(call.place.grad_dtype, gradient.dtype))
            yield start_reduce_scatter(wire, call.place.ring_group, "backward")

    return one_ahead(started())


def _columns(kv: Tensor, part: Range, call: Call) -> tuple[Tensor, Tensor]:
    """Keys and values of some KV heads, views."""
    keys, values = kv.split([call.num_kv_heads * dim for dim in call.dims], dim=-1)
    (start, stop), (head_dim, value_dim) = part, call.dims
    return keys[..., start * head_dim : stop * head_dim], values[..., start * value_dim : stop * value_dim]


def _blocks(part: Range, geometry: Geometry, call: Call) -> Iterator[Block]:
    """The kernel calls of a stage: query heads by their place among all, KV heads by that in the stage."""
    group = call.split.group_size
    run = HeadRun(part[0] * group, part[1] * group, 0, part[1] - part[0])
    pairs = plan_gathered(geometry, call.place.ring_rank)
    return blocks(pairs, [run], call, packed=geometry.documents is not None, joined=False)


def _reorder(x: Tensor, geometry: Geometry, to_row: bool) -> Tensor:
    """From the order of the ranks to that of the row, or back; x [T, B, channels]."""
    if geometry.layout == "contiguous":
        return x
    index = _orders(geometry.without_mask(), x.device)[0 if to_row else 1]
    if index.shape[1] == 1:
        return x.index_select(0, index[:, 0])
    return x[index, torch.arange(x.shape[1], device=x.device)]


@lru_cache(maxsize=2)  # of this batch and the next; they are as long as the sequence
def _orders(geometry: Geometry, device: torch.device) -> tuple[Tensor, Tensor]:
    """[T, rows] each: where in the order of the ranks the tokens of the row are, and the inverse."""
    tokens = torch.from_numpy(np.concatenate([token_index(held, geometry.num_rows) for held in held_by(geometry)]))
    return tokens.argsort(dim=0).to(device), tokens.to(device)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)  # of lse and what else is kept: there are none
    q, kv, documents, sinks, ctx.settings = inputs
    ctx.save_for_backward(q, kv, documents, sinks, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dout: Tensor, _dlse: object):  # type: ignore[no-untyped-def]
    q, kv, documents, sinks, *output = ctx.saved_tensors
    dq, dkv, dsinks = torch.ops.ds_ulysses.all_gather_attention_backward(
        dout, [q, kv, *output], documents, sinks, ctx.settings
    )
    return dq, dkv, None, None if sinks is None else dsinks, None


_all_gather_attention.register_autograd(_backward, setup_context=_keep)
