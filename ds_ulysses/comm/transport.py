"""What travels over the ring, and when: blocks of keys and values out, their gradients home.

Shapes: n tokens of a ring rank, U ranks of a Ulysses group, B batch.

    kv       [n, B, channels], keys and values side by side; spread keys: [n / U, B, all channels]
    block    [M, B, channels] of the M tokens that a step needs; B = 1 if rows hold documents of their own
    parked   flat: the block that came last, kept for the backward

A shard of keys is this rank's own part of what its ring rank holds: all of it, or 1 / U of it if keys are spread over
the Ulysses group on arrival.

    forward     own block, then by distance 1, 2, ...
    backward    the farthest first, which was parked, then back by distance, the own block last

Each is one stage or two (ring, then spreading) of pending transfers, and `one_ahead` keeps the next one on its way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ds_ulysses.comm.channels import ChannelTable
from ds_ulysses.comm.collectives import Pending, one_ahead, start_shift
from ds_ulysses.comm.exchange import place, start_gather, start_scatter
from ds_ulysses.config import Direction, accumulation_dtype, wire_dtype
from ds_ulysses.placement import Placement, Slice, Step, num_tokens


class Ring:
    """This rank's end of the ring, for one pass over the steps of its schedule."""

    def __init__(
        self, steps: Sequence[Step], kv: Tensor, parked: Tensor, placement: Placement, spread: ChannelTable | None
    ) -> None:
        """`parked` is written by the forward and read by the backward; `spread`: the channels of keys and values that
        each rank of the Ulysses group attends with, if keys cross the ring as sequence shards."""
        self.kv, self.parked, self.placement, self.spread = kv, parked, placement, spread
        self.steps, self.reverse = steps, list(reversed(steps))
        self.part = 0 if spread is None else placement.ulysses_rank

    def blocks_forward(self) -> Iterator[Tensor]:
        """Yield the block of each step."""
        shards = one_ahead(self._fetch(step, step.send[self.part], "forward") for step in self.steps)
        return self._spread(self.steps, shards, "forward")

    def blocks_backward(self) -> Iterator[Tensor]:
        """Yield the block of each step, the last step first."""
        started = (
            self._fetch(step, () if step.parked_there else step.send[self.part], "backward") for step in self.reverse
        )
        return self._spread(self.reverse, one_ahead(started), "backward")

    def bring_home(self, gradients: Iterator[Tensor], total: Tensor) -> None:
        """Take the gradient of each block, in the order of the backward, to the rank that it is of, and add it there.

        `total` has the shape of kv and the accumulation dtype.
        """
        wire, group = wire_dtype(self.placement.mesh.grad_dtype, total.dtype), self.placement.ring_group

        def started() -> Iterator[Pending[Tensor]]:
            for step, gradient in zip(self.reverse, self._collect(gradients), strict=True):
                if step.distance == 0:
                    yield Pending(gradient)
                else:
                    shape = (num_tokens(step.send[self.part]), *gradient.shape[1:])
                    received = gradient.new_empty(shape, dtype=wire)
                    yield start_shift(gradient.to(wire), received, -step.distance, group, "backward")

        for step, gradient in zip(self.reverse, one_ahead(started()), strict=True):
            at = 0
            for piece in step.send[self.part]:
                stop = at + piece.stop - piece.start
                self._of(total, piece).add_(gradient[at:stop])
                at = stop

    def _fetch(self, step: Step, sent: Sequence[Slice], direction: Direction) -> Pending[Tensor]:
        """Start what the step brings of this part of the keys, while sending what the other side needs."""
        pieces = [self._of(self.kv, piece) for piece in sent]
        # One piece is a view of kv, and so ready to be sent unless rows are cut out of a batch.
        leaving = pieces[0].contiguous() if len(pieces) == 1 else torch.cat([self._of(self.kv, NOTHING), *pieces])
        if step.distance == 0:
            return Pending(leaving)
        shape = (step.receive[self.part], leaving.shape[1], leaving.shape[2])
        if not step.parked:
            block = leaving.new_empty(shape)
            return start_shift(leaving, block, step.distance, self.placement.ring_group, direction)
        block = self.parked[: math.prod(shape)].view(shape)
        received = block if direction == "forward" else block[:0]
        pending = start_shift(leaving, received, step.distance, self.placement.ring_group, direction)
        return pending.then(lambda _: block)

    def _spread(self, steps: Sequence[Step], shards: Iterator[Tensor], direction: Direction) -> Iterator[Tensor]:
        """From this rank's part of each block, all channels, to all of the block, this rank's channels."""
        at, table = self.placement, self.spread
        if table is None:
            return shards
        return one_ahead(
            start_scatter(self._columns(shard), table, step.receive, at.ulysses_rank, at.ulysses_group, direction)
            for step, shard in zip(steps, shards, strict=True)
        )

    def _collect(self, gradients: Iterator[Tensor]) -> Iterator[Tensor]:
        """Undo `_spread`: the gradient of this rank's part of each block, summed over the ranks that used its heads."""
        at, table = self.placement, self.spread
        if table is None:
            yield from gradients
            return

        def started() -> Iterator[Pending[list[Tensor]]]:
            for step, gradient in zip(self.reverse, gradients, strict=True):
                wire = gradient.to(wire_dtype(self.placement.mesh.grad_dtype, gradient.dtype))
                yield start_gather(wire, table, step.receive, at.ulysses_rank, at.ulysses_group, "backward")

        for pieces in one_ahead(started()):
            shape = (*pieces[0].shape[:2], self.kv.shape[2])
            shard = pieces[0].new_zeros(shape, dtype=accumulation_dtype(self.kv.dtype))
            place(pieces, table, self._columns(shard), adds=(True, True))
            yield shard

    def _columns(self, shard: Tensor) -> list[Tensor]:
        """Keys and values, views."""
        assert self.spread is not None
        return list(shard.split(self.spread.totals, dim=2))

    def _of(self, x: Tensor, piece: Slice) -> Tensor:
        """The tokens of a slice, of its row or of all rows: a view."""
        tokens = x[piece.start : piece.stop]
        return tokens[:, piece.row : piece.row + 1] if self.placement.packed else tokens


NOTHING = Slice(0, 0, 0)
