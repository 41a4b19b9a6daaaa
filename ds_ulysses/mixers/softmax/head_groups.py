"""Ulysses in head groups: the next group travels while this one is computed, forward and backward.

The exchange of Ulysses is a barrier: nothing is computed until everything has arrived. Cut into groups of heads, it is
one only for the first. Every KV head travels once, with the first group that needs it. The backward takes the groups
from last to first, so that a KV head's gradient is complete when its group's turn comes.

Shapes: B batch, S local tokens, P ranks, T = S * P tokens, h and k query and KV heads that a group brings to this rank,
D dim of queries and keys, E of values.

    q, k, v   [B, S, channels]
    buffer    [T, B, h * D + k * (D + E)] of a group
    out       [B, S, H * E]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ulysses.comm import ChannelTable, Pending, one_ahead, place, start_gather, start_scatter
from ds_ulysses.config import Direction, accumulation_dtype
from ds_ulysses.kernels import Triple
from ds_ulysses.mixers.softmax.buffers import heads, queries_keys_values
from ds_ulysses.mixers.softmax.call import Call, Settings, call_of, decode
from ds_ulysses.mixers.softmax.kernel_calls import attend_once
from ds_ulysses.mixers.softmax.sinks import apply_sinks, sink_gradients
from ds_ulysses.placement import HeadGroup, Placement, split_heads


def head_group_attention(qkv: Triple, placement: Placement, sinks: Tensor | None, settings: str) -> Tensor:
    """Exchange, attend and exchange back: [B, S, channels] each in, [B, S, H * E] out. Differentiable."""
    return torch.ops.ds_ulysses.head_groups(list(qkv), placement, sinks, settings)[0]


Carried = dict[int, tuple[Tensor, Tensor]]
"""By group: what later groups add to dk and dv of its last KV head, [B, T, 1, D] and [B, T, 1, E], at least fp32."""


class _Kept(NamedTuple):
    """What the backward needs of each group: its buffer, out [T, B, h * E] and lse [B, h, T]."""

    buffers: list[Tensor]
    outs: list[Tensor]
    lses: list[Tensor]


@torch.library.custom_op("ds_ulysses::head_groups", mutates_args=())
def _head_groups(qkv: list[Tensor], placement: Placement, sinks: Tensor | None, settings: str) -> list[Tensor]:
    placement.refuse_others(qkv[0].shape[0], qkv[0].shape[1] * placement.ulysses_size)
    call = call_of(placement, settings)
    out, kept = _empty_out(qkv[0], call.settings), _Kept([], [], [])
    token_major, views = [x.transpose(0, 1) for x in qkv], list[Triple]()

    def computed() -> Iterator[Pending[list[Tensor]]]:
        arriving = (_scatter(token_major, tables.qkv, call, "forward") for tables in call.group_tables)
        for index, buffer in enumerate(one_ahead(arriving)):
            group = call.head_groups[index]
            kept.buffers.append(buffer)
            views.append(queries_keys_values(buffer, group.counts, call.dims))
            todo = [(kernel_call, *views[owner][1:]) for owner, kernel_call in call.group_calls[index]]
            group_out, lse = attend_once(views[-1][0], todo, call.kernel, call.settings.value_dim)
            own_sinks = None if sinks is None else sinks[_local(group, call)]
            apply_sinks(heads(group_out, call.settings.value_dim), lse, own_sinks)
            kept.outs.append(group_out)
            kept.lses.append(lse)
            yield _gather(group_out, call.group_tables[index].out, call, "forward")

    for tables, pieces in zip(call.group_tables, one_ahead(computed()), strict=True):
        place(pieces, tables.out, [out.transpose(0, 1)], adds=[False])
    return [out, *kept.buffers, *kept.outs, *kept.lses]


def _empty_out(q: Tensor, settings: Settings) -> Tensor:
    return q.new_empty(*q.shape[:2], settings.num_heads * settings.value_dim)


@_head_groups.register_fake
def _(qkv: list[Tensor], placement: Placement, sinks: object, settings: str) -> list[Tensor]:
    own = decode(settings)
    batch, tokens = qkv[0].shape[0], qkv[0].shape[1] * placement.ulysses_size
    split = split_heads(own.num_heads, own.num_kv_heads, placement.ulysses_size)
    counts = [group.counts for group in split.groups(placement.ulysses_rank, placement.head_groups)]
    out, value_dim = _empty_out(qkv[0], own), own.value_dim
    buffers = [out.new_empty(tokens, batch, q * own.head_dim + kv * own.kv_dim) for q, kv in counts]
    outs = [out.new_empty(tokens, batch, q * value_dim) for q, _ in counts]
    lses = [out.new_empty(batch, q, tokens, dtype=accumulation_dtype(out.dtype)) for q, _ in counts]
    return [out, *buffers, *outs, *lses]


@torch.library.custom_op("ds_ulysses::head_groups_backward", mutates_args=())
def _head_groups_backward(
    dout: Tensor, saved: list[Tensor], placement: Placement, sinks: Tensor | None, settings: str
) -> list[Tensor]:
    call = call_of(placement, settings)
    count, value_dim = placement.head_groups, call.settings.value_dim
    kept = _Kept(saved[:count], saved[count : 2 * count], saved[2 * count :])
    dsinks = torch.zeros_like(sinks) if sinks is not None else kept.lses[0].new_empty(0)
    carried: Carried = {}

    def computed() -> Iterator[Pending[list[Tensor]]]:
        token_major = [dout.transpose(0, 1)]
        arriving = one_ahead(_scatter(token_major, x.out, call, "backward") for x in reversed(call.group_tables))
        for index in reversed(range(count)):
            views = heads(next(arriving), value_dim), heads(kept.outs[index], value_dim), kept.lses[index]
            gradient = _group_backward(index, views, kept.buffers, carried, call)
            if sinks is not None:
                own = _local(call.head_groups[index], call)
                dsinks[own] = sink_gradients(*views, sinks[own])
            yield _gather(gradient, call.group_tables[index].qkv, call, "backward")

    shared, gradients = call.split.shares_kv_heads, one_ahead(computed())
    first = next(gradients)  # so that what they are put together in is not in memory while the first is computed
    dtypes = [dout.dtype, *[accumulation_dtype(dout.dtype) if shared else dout.dtype] * 2]
    sizes = _channels(call.settings)
    sums = [dout.new_zeros(*dout.shape[:2], size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    for tables, pieces in zip(reversed(call.group_tables), chain([first], gradients), strict=True):
        place(pieces, tables.qkv, [x.transpose(0, 1) for x in sums], adds=[False, shared, shared])
    return [*(x.to(dout.dtype) for x in sums), dsinks]


@_head_groups_backward.register_fake
def _(dout: Tensor, saved: list[Tensor], placement: object, sinks: Tensor | None, settings: str) -> list[Tensor]:
    dsinks = saved[-1].new_empty(0 if sinks is None else sinks.shape)
    return [*(dout.new_empty(*dout.shape[:2], size) for size in _channels(decode(settings))), dsinks]


def _channels(settings: Settings) -> list[int]:
    """Of q, k and v."""
    keys, values = (settings.num_kv_heads * dim for dim in (settings.head_dim, settings.value_dim))
    return [settings.num_heads * settings.head_dim, keys, values]


def _group_backward(index: int, views: Triple, buffers: list[Tensor], carried: Carried, call: Call) -> Tensor:
    """The gradient of a group's buffer; `views` are dout, out and lse.

    Only the last KV head of a group can be needed by later groups. What they found is in `carried`, by group.
    """
    dout, *softmax = views
    groups, buffer = call.head_groups, buffers[index]
    gradient = torch.zeros_like(buffer) if call.placement.packed else torch.empty_like(buffer)
    by_group = [queries_keys_values(x, g.counts, call.dims) for x, g in zip(buffers, groups, strict=True)]
    q, (dq, dk, dv) = by_group[index][0], queries_keys_values(gradient, groups[index].counts, call.dims)
    for owner, kernel_call in call.group_calls[index]:
        _, k, v = by_group[owner]
        if owner == index:
            kernel_call.write_gradients(call.kernel, dout, (q, k, v), softmax, (dq, dk, dv))
            continue
        grads = kernel_call.gradients(call.kernel, dout, (q, k, v), softmax)
        kernel_call.of_q(dq).copy_(grads[0])
        if owner not in carried:
            sums = [softmax[1].new_zeros(x.shape[0], x.shape[1], 1, x.shape[3]) for x in (k, v)]
            carried[owner] = sums[0], sums[1]
        for total, part in zip(carried[owner], grads[1:], strict=True):
            total[kernel_call.key_rows, kernel_call.keys].add_(part)
    if index in carried:
        for whole, total in zip((dk, dv), carried.pop(index), strict=True):
            whole[:, :, -1:].add_(total)
    return gradient


def _local(group: HeadGroup, call: Call) -> slice:
    """A group's query heads among those of this rank."""
    first, _ = call.split.q_range(call.placement.ulysses_rank)
    return slice(group.q_range[0] - first, group.q_range[1] - first)


def _scatter(tensors: Sequence[Tensor], table: ChannelTable, call: Call, direction: Direction) -> Pending[Tensor]:
    """Start what a group needs of q, k and v, or of dout; tensors [S, B, channels]."""
    at = call.placement
    tokens = [tensors[0].shape[0]] * at.ulysses_size
    return start_scatter(tensors, table, tokens, at.ulysses_rank, at.ulysses_group, direction)


def _gather(x: Tensor, table: ChannelTable, call: Call, direction: Direction) -> Pending[list[Tensor]]:
    """Start the way back of a group's out, or of its dq, dk and dv."""
    at = call.placement
    tokens = [x.shape[0] // at.ulysses_size] * at.ulysses_size
    return start_gather(x, table, tokens, at.ulysses_rank, at.ulysses_group, direction)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)  # of lse and what else is kept: there are none
    _, ctx.placement, sinks, ctx.settings = inputs
    ctx.save_for_backward(sinks, *output[1:])


def _backward(ctx, grads: list[Tensor]):  # type: ignore[no-untyped-def]
    sinks, *saved = ctx.saved_tensors
    *dqkv, dsinks = torch.ops.ds_ulysses.head_groups_backward(grads[0], saved, ctx.placement, sinks, ctx.settings)
    return dqkv, None, None if sinks is None else dsinks, None


_head_groups.register_autograd(_backward, setup_context=_keep)
