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

import torch
from torch import Tensor

from ds_ulysses.comm.channels import ChannelTable, table_named
from ds_ulysses.comm.collectives import Pending, start_all_to_all
from ds_ulysses.config import Direction, accumulation_dtype
from ds_ulysses.placement import Placement


def scatter_channels(tensors: Sequence[Tensor], table: ChannelTable, placement: Placement) -> Tensor:
    """Exchange sequence shards for channel shards: 1 all-to-all, 1 copy.

    `tensors`: each [B, S, C_t], same B, S and dtype, S equal on all ranks of the Ulysses group of
    `placement`. Returns [T, B, width of this rank], the tensors side by side in the last dim. Differentiable; the
    backward is `gather_channels`.
    """
    return torch.ops.ds_ulysses.scatter_channels(list(tensors), table.name, placement, "forward")


def gather_channels(x: Tensor, table: ChannelTable, placement: Placement) -> list[Tensor]:
    """Exchange channel shards for sequence shards: 1 all-to-all, 1 copy.

    `x`: [T, B, width of this rank]. Returns one [B, S, C_t] per tensor of the table; channels that several ranks hold
    are summed. Differentiable; the backward is `scatter_channels`.
    """
    return torch.ops.ds_ulysses.gather_channels(x, table.name, placement, "forward")


def start_scatter(
    tensors: Sequence[Tensor], table: ChannelTable, tokens: Sequence[int], rank: int, group: str, direction: Direction
) -> Pending[Tensor]:
    """Start the exchange of token-major [S, B, C_t] of each tensor -> [sum of tokens, B, C_rank].

    `tokens` of each rank, S here.
    """
    batch = tensors[0].shape[1]
    send_sizes = [tokens[rank] * batch * width for width in table.widths]
    send = tensors[0].new_empty(sum(send_sizes))
    for piece, width, bounds in zip(send.split(send_sizes), table.widths, table.by_rank, strict=True):
        columns = [x[..., start:stop] for x, (start, stop) in zip(tensors, bounds, strict=True)]
        torch.cat(columns, dim=-1, out=piece.view(tokens[rank], batch, width))
    width = table.widths[rank]
    pending = start_all_to_all(send, send_sizes, [t * batch * width for t in tokens], group, direction)
    return pending.then(lambda received: received.view(sum(tokens), batch, width))


def start_gather(
    x: Tensor, table: ChannelTable, tokens: Sequence[int], rank: int, group: str, direction: Direction
) -> Pending[list[Tensor]]:
    """Start the way back: [sum of tokens, B, C_rank] -> what each rank has of this rank's tokens.

    The pieces, [S, B, C of that rank], are for `place`.
    """
    batch = x.shape[1]
    receive_sizes = [tokens[rank] * batch * width for width in table.widths]
    send_sizes = [t * batch * table.widths[rank] for t in tokens]
    pending = start_all_to_all(x.reshape(-1), send_sizes, receive_sizes, group, direction)
    return pending.then(
        lambda received: [
            piece.view(tokens[rank], batch, width)
            for piece, width in zip(received.split(receive_sizes), table.widths, strict=True)
        ]
    )


def place(pieces: Sequence[Tensor], table: ChannelTable, outputs: Sequence[Tensor], adds: Sequence[bool]) -> None:
    """Write what came from each rank into the channels of `outputs` [S, B, C_t], one per tensor, or add it."""
    offsets = [0] * len(pieces)
    for row, output, add in zip(table.ranges, outputs, adds, strict=True):
        for index, (start, stop) in enumerate(row):
            column = pieces[index][..., offsets[index] : offsets[index] + stop - start]
            offsets[index] += stop - start
            if add:
                output[..., start:stop] += column
            else:
                output[..., start:stop] = column


@torch.library.custom_op("ds_ulysses::scatter_channels", mutates_args=())
def _scatter_channels(tensors: list[Tensor], table: str, placement: Placement, direction: str) -> Tensor:
    found = table_named(table)
    tokens = [tensors[0].shape[1]] * len(found.widths)
    rank, group = placement.ulysses_rank, placement.ulysses_group
    return start_scatter([x.transpose(0, 1) for x in tensors], found, tokens, rank, group, _direction(direction)).wait()


@_scatter_channels.register_fake
def _(tensors: list[Tensor], table: str, placement: Placement, direction: str) -> Tensor:
    widths = table_named(table).widths
    batch, tokens = tensors[0].shape[:2]
    return tensors[0].new_empty(tokens * len(widths), batch, widths[placement.ulysses_rank])


@torch.library.custom_op("ds_ulysses::gather_channels", mutates_args=())
def _gather_channels(x: Tensor, table: str, placement: Placement, direction: str) -> list[Tensor]:
    found = table_named(table)
    tokens = x.shape[0] // len(found.widths)
    rank, group = placement.ulysses_rank, placement.ulysses_group
    pieces = start_gather(x, found, [tokens] * len(found.widths), rank, group, _direction(direction)).wait()
    outputs = []
    for total, add in zip(found.totals, found.overlaps, strict=True):
        shape = (x.shape[1], tokens, total)
        outputs.append(x.new_zeros(shape, dtype=accumulation_dtype(x.dtype)) if add else x.new_empty(shape))
    place(pieces, found, [output.transpose(0, 1) for output in outputs], found.overlaps)
    return [output.to(x.dtype) for output in outputs]


@_gather_channels.register_fake
def _(x: Tensor, table: str, placement: Placement, direction: str) -> list[Tensor]:
    found = table_named(table)
    tokens, batch = x.shape[0] // len(found.widths), x.shape[1]
    return [x.new_empty(batch, tokens, total) for total in found.totals]


def _direction(name: str) -> Direction:
    return "backward" if name == "backward" else "forward"


def _reverse(direction: str) -> Direction:
    return "forward" if direction == "backward" else "backward"


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, ctx.table, ctx.placement, ctx.direction = inputs


def _backward_of_scatter(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    grads = torch.ops.ds_ulysses.gather_channels(grad, ctx.table, ctx.placement, _reverse(ctx.direction))
    return grads, None, None, None


def _backward_of_gather(ctx, grads: list[Tensor]):  # type: ignore[no-untyped-def]
    grad = torch.ops.ds_ulysses.scatter_channels(grads, ctx.table, ctx.placement, _reverse(ctx.direction))
    return grad, None, None, None


_scatter_channels.register_autograd(_backward_of_scatter, setup_context=_keep)
_gather_channels.register_autograd(_backward_of_gather, setup_context=_keep)
