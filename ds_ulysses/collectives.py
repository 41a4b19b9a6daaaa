"""The only file that communicates: opaque ops with their adjoints, and the ledger's pen.

Shapes: B batch, S local tokens, P ranks of the group, T = S * P tokens, C channels (heads * head_dim).
A rank starts with all channels of its S tokens and ends with its own channels of all T tokens, or back:

    scatter_channels    [B, S, C] of each tensor  ->  [T, B, C_rank] of all tensors side by side
    gather_channels     [T, B, C_rank]            ->  [B, S, C] of each tensor

They are each other's adjoint. One copy packs (or unpacks) by rank; the other side of the wire is a view,
because what arrives token-major is already in the order of the whole sequence.

Each is a torch.library op, so torch.compile neither looks inside nor inlines its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]

from ds_ulysses.heads import Range
from ds_ulysses.ledger import Direction, Entry, record

ChannelRanges = Sequence[Sequence[Range]]
"""[tensor][rank]: the channels of a tensor that a rank needs. Ranges of different ranks may overlap."""


def scatter_channels(tensors: Sequence[Tensor], ranges: ChannelRanges, group: ProcessGroup) -> Tensor:
    """Exchange sequence shards for channel shards: 1 all-to-all, 1 copy.

    `tensors`: each [B, S, C_t], same B, S and dtype, S equal on all ranks. Returns [T, B, sum of this rank's
    range widths], the tensors side by side in the last dim. Differentiable; the backward is `gather_channels`.
    """
    flat = _flatten(ranges)
    return torch.ops.ds_ulysses.scatter_channels(list(tensors), flat, dist.get_rank(group), group.group_name, "forward")


def gather_channels(x: Tensor, ranges: ChannelRanges, group: ProcessGroup) -> list[Tensor]:
    """Exchange channel shards for sequence shards: 1 all-to-all, 1 copy.

    `x`: [T, B, sum of this rank's range widths]. Returns one [B, S, C_t] per row of `ranges`; channels that
    several ranks hold are summed. Differentiable; the backward is `scatter_channels`.
    """
    flat = _flatten(ranges)
    return torch.ops.ds_ulysses.gather_channels(x, flat, len(ranges), dist.get_rank(group), group.group_name, "forward")


def sum_over_world(x: Tensor) -> Tensor:
    """Sum a small tensor over all ranks. Not differentiable."""
    return torch.ops.ds_ulysses.sum_over_world(x)


def same_on_all_ranks(values: Sequence[int], group: ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks of the group pass equal values, as many on each. The answer is the same on all of them."""
    own = torch.tensor(values, dtype=torch.long, device=device)
    least_and_greatest = torch.cat([own, -own])
    dist.all_reduce(least_and_greatest, op=dist.ReduceOp.MAX, group=group)
    record(Entry("all_reduce", "ulysses", own.dtype, 2 * own.numel() * own.element_size(), "forward"))
    greatest, negative_least = least_and_greatest.chunk(2)
    return bool((greatest == -negative_least).all())


@torch.library.custom_op("ds_ulysses::scatter_channels", mutates_args=())
def _scatter_channels(tensors: list[Tensor], ranges: list[int], rank: int, group: str, direction: str) -> Tensor:
    table = _table(ranges, len(tensors))
    widths = _widths(table)
    batch, tokens = tensors[0].shape[:2]
    sizes = [tokens * batch * width for width in widths]
    send = tensors[0].new_empty(sum(sizes))
    for piece, width, bounds in zip(send.split(sizes), widths, zip(*table, strict=True), strict=True):
        columns = [x[..., start:stop].transpose(0, 1) for x, (start, stop) in zip(tensors, bounds, strict=True)]
        torch.cat(columns, dim=-1, out=piece.view(tokens, batch, width))
    received = _all_to_all(send, sizes, [sizes[rank]] * len(sizes), rank, group, direction)
    return received.view(tokens * len(sizes), batch, widths[rank])


@_scatter_channels.register_fake
def _(tensors: list[Tensor], ranges: list[int], rank: int, group: str, direction: str) -> Tensor:
    widths = _widths(_table(ranges, len(tensors)))
    batch, tokens = tensors[0].shape[:2]
    return tensors[0].new_empty(tokens * len(widths), batch, widths[rank])


@torch.library.custom_op("ds_ulysses::gather_channels", mutates_args=())
def _gather_channels(
    x: Tensor, ranges: list[int], num_tensors: int, rank: int, group: str, direction: str
) -> list[Tensor]:
    table = _table(ranges, num_tensors)
    widths = _widths(table)
    tokens, batch = x.shape[0] // len(widths), x.shape[1]
    sizes = [tokens * batch * width for width in widths]
    received = _all_to_all(x.reshape(-1), [sizes[rank]] * len(sizes), sizes, rank, group, direction)
    blocks = [
        piece.view(tokens, batch, width).transpose(0, 1)
        for piece, width in zip(received.split(sizes), widths, strict=True)
    ]
    outputs, offsets = [], [0] * len(widths)
    for row in table:
        columns = [block[..., o : o + b - a] for block, o, (a, b) in zip(blocks, offsets, row, strict=True)]
        offsets = [o + b - a for o, (a, b) in zip(offsets, row, strict=True)]
        outputs.append(_assemble(columns, row))
    return outputs


@_gather_channels.register_fake
def _(x: Tensor, ranges: list[int], num_tensors: int, rank: int, group: str, direction: str) -> list[Tensor]:
    table = _table(ranges, num_tensors)
    tokens, batch = x.shape[0] // len(table[0]), x.shape[1]
    return [x.new_empty(batch, tokens, max(stop for _, stop in row)) for row in table]


@torch.library.custom_op("ds_ulysses::sum_over_world", mutates_args=())
def _sum_over_world(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    record(Entry("all_reduce", "world", x.dtype, x.numel() * x.element_size(), "forward"))
    return total


@_sum_over_world.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _assemble(columns: list[Tensor], row: list[Range]) -> Tensor:
    """Put the ranks' columns of one tensor in place; sum where ranges overlap, in at least fp32."""
    filled = [(column, bounds) for column, bounds in zip(columns, row, strict=True) if bounds[0] < bounds[1]]
    bounds = [bounds for _, bounds in filled]
    if all(left[1] == right[0] for left, right in pairwise(bounds)):
        return torch.cat([column for column, _ in filled], dim=-1)
    shape = (*columns[0].shape[:-1], max(stop for _, stop in row))
    total = columns[0].new_zeros(shape, dtype=torch.promote_types(columns[0].dtype, torch.float32))
    for column, (start, stop) in filled:
        total[..., start:stop] += column
    return total.to(columns[0].dtype)


def _all_to_all(
    send: Tensor, send_sizes: list[int], receive_sizes: list[int], rank: int, group: str, direction: str
) -> Tensor:
    """Flat buffers, sizes in elements per rank."""
    received = send.new_empty(sum(receive_sizes))
    handle = _resolve_process_group(GroupName(group))
    dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=handle)
    sent = (sum(send_sizes) - send_sizes[rank]) * send.element_size()
    record(Entry("all_to_all", "ulysses", send.dtype, sent, _direction(direction)))
    return received


def _direction(name: str) -> Direction:
    return "backward" if name == "backward" else "forward"


def _reverse(direction: str) -> Direction:
    return "forward" if direction == "backward" else "backward"


def _flatten(ranges: ChannelRanges) -> list[int]:
    """As the ops take them, whose arguments do not nest."""
    return [bound for row in ranges for pair in row for bound in pair]


def _table(ranges: list[int], num_tensors: int) -> list[list[Range]]:
    """Undo the flattening: [tensor][rank] -> (start, stop)."""
    pairs = list(zip(ranges[::2], ranges[1::2], strict=True))
    num_ranks = len(pairs) // num_tensors
    return [pairs[i * num_ranks : (i + 1) * num_ranks] for i in range(num_tensors)]


def _widths(table: list[list[Range]]) -> list[int]:
    """Channels of each rank, all tensors together."""
    return [sum(stop - start for start, stop in bounds) for bounds in zip(*table, strict=True)]


def _keep_for_scatter(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    tensors, ctx.ranges, ctx.rank, ctx.group, ctx.direction = inputs
    ctx.num_tensors = len(tensors)


def _backward_of_scatter(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    grads = torch.ops.ds_ulysses.gather_channels(
        grad, ctx.ranges, ctx.num_tensors, ctx.rank, ctx.group, _reverse(ctx.direction)
    )
    return grads, None, None, None, None


def _keep_for_gather(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, ctx.ranges, _, ctx.rank, ctx.group, ctx.direction = inputs


def _backward_of_gather(ctx, grads: list[Tensor]):  # type: ignore[no-untyped-def]
    grad = torch.ops.ds_ulysses.scatter_channels(grads, ctx.ranges, ctx.rank, ctx.group, _reverse(ctx.direction))
    return grad, None, None, None, None, None


_scatter_channels.register_autograd(_backward_of_scatter, setup_context=_keep_for_scatter)
_gather_channels.register_autograd(_backward_of_gather, setup_context=_keep_for_gather)
