"""The exchange of Ulysses: sequence shards for head shards and back, in one all-to-all of all tensors.

Shapes: B batch, S local tokens, P ranks of the group, T = S * P tokens, C channels (heads * head_dim).
A rank starts with all channels of its S tokens and ends with its own channels of all T tokens, or back:

    scatter_channels    [B, S, C] of each tensor  ->  [T, B, C_rank] of all tensors side by side
    gather_channels     [T, B, C_rank]            ->  [B, S, C] of each tensor

They are each other's adjoint. One copy packs (or unpacks) by rank; the other side of the wire is a view,
because what arrives token-major is already in the order of the whole sequence.

Each is a torch.library op, so torch.compile neither looks inside nor inlines its backward. `start_scatter` and
`start_gather` are the halves that they are made of, for those who compute in between; there, ranks may hold
different numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_ulysses.comm.collectives import Pending, start_all_to_all
from ds_ulysses.config import Direction, accumulation_dtype
from ds_ulysses.placement import Range

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


def start_scatter(
    tensors: Sequence[Tensor], ranges: ChannelRanges, tokens: Sequence[int], rank: int, group: str, direction: Direction
) -> Pending[Tensor]:
    """Token-major [S, B, C_t] of each tensor -> [sum of tokens, B, C_rank]; `tokens` of each rank, S here."""
    widths = _widths(ranges)
    batch = tensors[0].shape[1]
    send_sizes = [tokens[rank] * batch * width for width in widths]
    send = tensors[0].new_empty(sum(send_sizes))
    for piece, width, bounds in zip(send.split(send_sizes), widths, zip(*ranges, strict=True), strict=True):
        columns = [x[..., start:stop] for x, (start, stop) in zip(tensors, bounds, strict=True)]
        torch.cat(columns, dim=-1, out=piece.view(tokens[rank], batch, width))
    pending = start_all_to_all(send, send_sizes, [t * batch * widths[rank] for t in tokens], group, direction)
    return pending.then(lambda received: received.view(sum(tokens), batch, widths[rank]))


def start_gather(
    x: Tensor, ranges: ChannelRanges, tokens: Sequence[int], rank: int, group: str, direction: Direction
) -> Pending[list[Tensor]]:
    """[sum of tokens, B, C_rank] -> what each rank has of this rank's tokens: [S, B, C of that rank], for `place`."""
    widths = _widths(ranges)
    batch = x.shape[1]
    receive_sizes = [tokens[rank] * batch * width for width in widths]
    send_sizes = [t * batch * widths[rank] for t in tokens]
    pending = start_all_to_all(x.reshape(-1), send_sizes, receive_sizes, group, direction)
    return pending.then(
        lambda received: [
            piece.view(tokens[rank], batch, width)
            for piece, width in zip(received.split(receive_sizes), widths, strict=True)
        ]
    )


def place(pieces: Sequence[Tensor], ranges: ChannelRanges, outputs: Sequence[Tensor], adds: Sequence[bool]) -> None:
    """Write what came from each rank into the channels of `outputs` [S, B, C_t], one per row of `ranges`, or add it."""
    offsets = [0] * len(pieces)
    for row, output, add in zip(ranges, outputs, adds, strict=True):
        for index, (start, stop) in enumerate(row):
            column = pieces[index][..., offsets[index] : offsets[index] + stop - start]
            offsets[index] += stop - start
            if add:
                output[..., start:stop] += column
            else:
                output[..., start:stop] = column


def overlap(row: Sequence[Range]) -> bool:
    """Whether several ranks need the same channels, so that what comes back must be summed."""
    filled = [bounds for bounds in row if bounds[0] < bounds[1]]
    return any(left[1] > right[0] for left, right in pairwise(filled))


@torch.library.custom_op("ds_ulysses::scatter_channels", mutates_args=())
def _scatter_channels(tensors: list[Tensor], ranges: list[int], rank: int, group: str, direction: str) -> Tensor:
    table = _table(ranges, len(tensors))
    tokens = [tensors[0].shape[1]] * len(table[0])
    tensors = [x.transpose(0, 1) for x in tensors]
    return start_scatter(tensors, table, tokens, rank, group, _direction(direction)).wait()


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
    tokens = x.shape[0] // len(table[0])
    pieces = start_gather(x, table, [tokens] * len(table[0]), rank, group, _direction(direction)).wait()
    adds = [overlap(row) for row in table]
    outputs = []
    for row, add in zip(table, adds, strict=True):
        shape = (x.shape[1], tokens, max(stop for _, stop in row))
        sums = accumulation_dtype(x.dtype)
        outputs.append(x.new_zeros(shape, dtype=sums) if add else x.new_empty(shape))
    place(pieces, table, [output.transpose(0, 1) for output in outputs], adds)
    return [output.to(x.dtype) for output in outputs]


@_gather_channels.register_fake
def _(x: Tensor, ranges: list[int], num_tensors: int, rank: int, group: str, direction: str) -> list[Tensor]:
    table = _table(ranges, num_tensors)
    tokens, batch = x.shape[0] // len(table[0]), x.shape[1]
    return [x.new_empty(batch, tokens, max(stop for _, stop in row)) for row in table]


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


def _widths(ranges: ChannelRanges) -> list[int]:
    """Channels of each rank, all tensors together."""
    return [sum(stop - start for start, stop in bounds) for bounds in zip(*ranges, strict=True)]


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
