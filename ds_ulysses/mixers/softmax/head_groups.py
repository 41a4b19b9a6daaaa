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
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ds_ulysses.comm import Pending, one_ahead, place, start_gather, start_scatter
from ds_ulysses.config import Direction, accumulation_dtype
from ds_ulysses.kernels import Triple
from ds_ulysses.mixers.softmax.blocks import (
    Block,
    attend_once,
    block_gradients,
    blocks,
    heads,
    queries_keys_values,
    write_gradients,
)
from ds_ulysses.mixers.softmax.call import Call, decode
from ds_ulysses.mixers.softmax.sinks import apply_sinks, sink_gradients
from ds_ulysses.placement import HeadGroup, Range, plan_gathered


def head_group_attention(qkv: Triple, documents: Tensor | None, sinks: Tensor | None, call: Call) -> Tensor:
    """Exchange, attend and exchange back: [B, S, channels] each in, [B, S, H * E] out. Differentiable."""
    return torch.ops.ds_ulysses.head_groups(list(qkv), documents, sinks, call.encode())[0]


Carried = dict[int, tuple[Tensor, Tensor]]
"""By group: what later groups add to dk and dv of its last KV head, [B, T, 1, D] and [B, T, 1, E], at least fp32."""


What = Literal["qkv", "out"]
"""Which tensors travel: q, k and v (or their gradients), or the output (or its gradient)."""


class _Kept(NamedTuple):
    """What the backward needs of each group: its buffer, out [T, B, h * E] and lse [B, h, T]."""

    buffers: list[Tensor]
    outs: list[Tensor]
    lses: list[Tensor]


@torch.library.custom_op("ds_ulysses::head_groups", mutates_args=())
def _head_groups(qkv: list[Tensor], documents: Tensor | None, sinks: Tensor | None, settings: str) -> list[Tensor]:
    call = decode(settings)
    out, kept = _empty_out(qkv[0], call), _Kept([], [], [])
    token_major, views = [x.transpose(0, 1) for x in qkv], list[Triple]()

    def computed() -> Iterator[Pending[list[Tensor]]]:
        arriving = (_scatter(token_major, index, "qkv", call, "forward") for index in range(call.place.head_groups))
        for group, buffer in zip(_own_groups(call), one_ahead(arriving), strict=True):
            kept.buffers.append(buffer)
            views.append(queries_keys_values(buffer, group.counts, call.dims))
            todo = [(block, *views[owner][1:]) for owner, block in _blocks(group, buffer, documents, call)]
            group_out, lse = attend_once(views[-1][0], todo, call)
            apply_sinks(heads(group_out, call.value_dim), lse, None if sinks is None else sinks[_local(group, call)])
            kept.outs.append(group_out)
            kept.lses.append(lse)
            yield _gather(group_out, len(kept.outs) - 1, "out", call, "forward")

    for index, pieces in enumerate(one_ahead(computed())):
        place(pieces, _ranges(index, call, "out"), [out.transpose(0, 1)], adds=[False])
    return [out, *kept.buffers, *kept.outs, *kept.lses]


def _empty_out(q: Tensor, call: Call) -> Tensor:
    return q.new_empty(*q.shape[:2], call.num_heads * call.value_dim)


@_head_groups.register_fake
def _(qkv: list[Tensor], documents: object, sinks: object, settings: str) -> list[Tensor]:
    call = decode(settings)
    batch, tokens = qkv[0].shape[0], qkv[0].shape[1] * call.place.ulysses_size
    counts = [group.counts for group in _own_groups(call)]
    out = _empty_out(qkv[0], call)
    buffers = [out.new_empty(tokens, batch, q * call.head_dim + kv * call.kv_dim) for q, kv in counts]
    outs = [out.new_empty(tokens, batch, q * call.value_dim) for q, _ in counts]
    lses = [out.new_empty(batch, q, tokens, dtype=accumulation_dtype(out.dtype)) for q, _ in counts]
    return [out, *buffers, *outs, *lses]


@torch.library.custom_op("ds_ulysses::head_groups_backward", mutates_args=())
def _head_groups_backward(
    dout: Tensor, saved: list[Tensor], documents: Tensor | None, sinks: Tensor | None, settings: str
) -> list[Tensor]:
    call = decode(settings)
    count = call.place.head_groups
    kept = _Kept(saved[:count], saved[count : 2 * count], saved[2 * count :])
    dsinks = torch.zeros_like(sinks) if sinks is not None else kept.lses[0].new_empty(0)
    carried: Carried = {}

    def computed() -> Iterator[Pending[list[Tensor]]]:
        token_major = [dout.transpose(0, 1)]
        arriving = one_ahead(_scatter(token_major, index, "out", call, "backward") for index in reversed(range(count)))
        for index in reversed(range(count)):
            views = heads(next(arriving), call.value_dim), heads(kept.outs[index], call.value_dim), kept.lses[index]
            gradient = _group_backward(index, views, kept.buffers, documents, carried, call)
            if sinks is not None:
                own = _local(_own_groups(call)[index], call)
                dsinks[own] = sink_gradients(*views, sinks[own])
            yield _gather(gradient, index, "qkv", call, "backward")

    shared, gradients = call.split.shares_kv_heads, one_ahead(computed())
    first = next(gradients)  # so that what they are put together in is not in memory while the first is computed
    dtypes = [dout.dtype, *[accumulation_dtype(dout.dtype) if shared else dout.dtype] * 2]
    sizes = _channels(call)
    sums = [dout.new_zeros(*dout.shape[:2], size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    for index, pieces in zip(reversed(range(count)), chain([first], gradients), strict=True):
        place(pieces, _ranges(index, call, "qkv"), [x.transpose(0, 1) for x in sums], adds=[False, shared, shared])
    return [*(x.to(dout.dtype) for x in sums), dsinks]


@_head_groups_backward.register_fake
def _(dout: Tensor, saved: list[Tensor], documents: object, sinks: Tensor | None, settings: str) -> list[Tensor]:
    call = decode(settings)
    dsinks = saved[-1].new_empty(0 if sinks is None else sinks.shape)
    return [*(dout.new_empty(*dout.shape[:2], size) for size in _channels(call)), dsinks]


def _channels(call: Call) -> list[int]:
    """Of q, k and v."""
    return [call.num_heads * call.head_dim, call.num_kv_heads * call.head_dim, call.num_kv_heads * call.value_dim]


def _group_backward(
    index: int,
    views: Triple,
    buffers: list[Tensor],
    documents: Tensor | None,
    carried: Carried,
    call: Call,
) -> Tensor:
    """The gradient of a group's buffer; `views` are dout, out and lse.

    Only the last KV head of a group can be needed by later groups. What they found is in `carried`, by group.
    """
    dout, out, lse = views
    groups, buffer = _own_groups(call), buffers[index]
    gradient = torch.empty_like(buffer) if documents is None else torch.zeros_like(buffer)
    by_group = [queries_keys_values(x, g.counts, call.dims) for x, g in zip(buffers, groups, strict=True)]
    q, (dq, dk, dv) = by_group[index][0], queries_keys_values(gradient, groups[index].counts, call.dims)
    for owner, block in _blocks(groups[index], buffer, documents, call):
        _, k, v = by_group[owner]
        if owner == index:
            write_gradients(block, dout, (q, k, v), (out, lse), (dq, dk, dv), call)
            continue
        grads = block_gradients(block, dout, (q, k, v), out, lse, call)
        block.of_q(dq).copy_(grads[0])
        if owner not in carried:
            sums = [lse.new_zeros(x.shape[0], x.shape[1], 1, x.shape[3]) for x in (k, v)]
            carried[owner] = sums[0], sums[1]
        for total, part in zip(carried[owner], grads[1:], strict=True):
            total[block.key_rows, block.keys].add_(part)
    if index in carried:
        for whole, total in zip((dk, dv), carried.pop(index), strict=True):
            whole[:, :, -1:].add_(total)
    return gradient


def _blocks(group: HeadGroup, buffer: Tensor, documents: Tensor | None, call: Call) -> Iterator[tuple[int, Block]]:
    """The kernel calls of a group, each with the index of the group that brought its keys."""
    pairs = plan_gathered(call.geometry(buffer, documents), 0)
    for owner, run in group.runs:
        for block in blocks(pairs, [run], call, documents is not None, joined=False):
            yield owner, block


def _local(group: HeadGroup, call: Call) -> slice:
    """A group's query heads among those of this rank."""
    first, _ = call.split.q_range(call.place.ulysses_rank)
    return slice(group.q_range[0] - first, group.q_range[1] - first)


def _own_groups(call: Call) -> list[HeadGroup]:
    return call.split.groups(call.place.ulysses_rank, call.place.head_groups)


def _ranges(index: int, call: Call, what: What) -> list[list[Range]]:
    """[tensor][rank]: the channels that each rank gets with a group."""
    groups = [call.split.groups(rank, call.place.head_groups)[index] for rank in range(call.place.ulysses_size)]
    q, kv = [group.q_range for group in groups], [group.kv_range for group in groups]
    wanted = [(q, call.value_dim)] if what == "out" else [(q, call.head_dim), (kv, call.head_dim), (kv, call.value_dim)]
    return [[(start * dim, stop * dim) for start, stop in bounds] for bounds, dim in wanted]


def _scatter(tensors: Sequence[Tensor], index: int, what: What, call: Call, direction: Direction) -> Pending[Tensor]:
    """Start what a group needs of q, k and v, or of dout; tensors [S, B, channels]."""
    tokens = [tensors[0].shape[0]] * call.place.ulysses_size
    ranges = _ranges(index, call, what)
    return start_scatter(tensors, ranges, tokens, call.place.ulysses_rank, call.place.ulysses_group, direction)


def _gather(x: Tensor, index: int, what: What, call: Call, direction: Direction) -> Pending[list[Tensor]]:
    """Start the way back of a group's out, or of its dq, dk and dv."""
    tokens = [x.shape[0] // call.place.ulysses_size] * call.place.ulysses_size
    ranges = _ranges(index, call, what)
    return start_gather(x, ranges, tokens, call.place.ulysses_rank, call.place.ulysses_group, direction)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)  # of lse and what else is kept: there are none
    _, documents, sinks, ctx.settings = inputs
    ctx.save_for_backward(documents, sinks, *output[1:])


def _backward(ctx, grads: list[Tensor]):  # type: ignore[no-untyped-def]
    documents, sinks, *saved = ctx.saved_tensors
    *dqkv, dsinks = torch.ops.ds_ulysses.head_groups_backward(grads[0], saved, documents, sinks, ctx.settings)
    return dqkv, None, None if sinks is None else dsinks, None


_head_groups.register_autograd(_backward, setup_context=_keep)
