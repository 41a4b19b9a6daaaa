"""What travels over the ring, and when: blocks of keys and values out, their gradients home.

Shapes: as in ring.py. A shard of keys is this rank's own part of what its ring rank holds: all of it, or 1 / U of it
if keys are spread over the Ulysses group on arrival.

    forward     own block, then by distance 1, 2, ...
    backward    the farthest first, which was parked, then back by distance, the own block last

Each is one stage or two (ring, then spreading) of pending transfers, and `one_ahead` keeps the next one on its way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ds_ulysses.comm import Pending, one_ahead, place, start_gather, start_scatter, start_shift
from ds_ulysses.config import Direction, accumulation_dtype, wire_dtype
from ds_ulysses.mixers.softmax.call import Call
from ds_ulysses.placement import Range, Slice, Step, num_tokens


class Ring:
    """This rank's end of the ring, for one pass over the steps of its plan."""

    def __init__(self, plan: Sequence[Step], kv: Tensor, parked: Tensor, packed: bool, call: Call) -> None:
        """`parked`, flat, is written by the forward and read by the backward; `packed`: rows hold own documents."""
        self.kv, self.parked, self.packed, self.call = kv, parked, packed, call
        self.plan, self.reverse = plan, list(reversed(plan))
        self.part = call.place.ulysses_rank if call.spreads_keys else 0

    def blocks_forward(self) -> Iterator[Tensor]:
        """The block of each step."""
        shards = one_ahead(self._fetch(step, step.send[self.part], "forward") for step in self.plan)
        return self._spread(self.plan, shards, "forward")

    def blocks_backward(self) -> Iterator[Tensor]:
        """The block of each step, the last step first."""
        started = (
            self._fetch(step, () if step.parked_there else step.send[self.part], "backward") for step in self.reverse
        )
        return self._spread(self.reverse, one_ahead(started), "backward")

    def bring_home(self, gradients: Iterator[Tensor], total: Tensor) -> None:
        """Take the gradient of each block, in the order of the backward, to the rank that it is of, and add it there.

        `total` has the shape of kv and the accumulation dtype.
        """
        wire, group = wire_dtype(self.call.place.grad_dtype, total.dtype), self.call.place.ring_group

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
            return start_shift(leaving, block, step.distance, self.call.place.ring_group, direction)
        block = self.parked[: math.prod(shape)].view(shape)
        received = block if direction == "forward" else block[:0]
        pending = start_shift(leaving, received, step.distance, self.call.place.ring_group, direction)
        return pending.then(lambda _: block)

    def _spread(self, plan: Sequence[Step], shards: Iterator[Tensor], direction: Direction) -> Iterator[Tensor]:
        """From this rank's part of each block, all channels, to all of the block, this rank's channels."""
        if not self.call.spreads_keys:
            return shards
        at, ranges = self.call.place, self._spread_channels()
        return one_ahead(
            start_scatter(self._columns(shard), ranges, step.receive, at.ulysses_rank, at.ulysses_group, direction)
            for step, shard in zip(plan, shards, strict=True)
        )

    def _collect(self, gradients: Iterator[Tensor]) -> Iterator[Tensor]:
        """Undo `_spread`: the gradient of this rank's part of each block, summed over the ranks that used its heads."""
        if not self.call.spreads_keys:
            yield from gradients
            return
        at, ranges = self.call.place, self._spread_channels()

        def started() -> Iterator[Pending[list[Tensor]]]:
            for step, gradient in zip(self.reverse, gradients, strict=True):
                wire = gradient.to(wire_dtype(self.call.place.grad_dtype, gradient.dtype))
                yield start_gather(wire, ranges, step.receive, at.ulysses_rank, at.ulysses_group, "backward")

        for pieces in one_ahead(started()):
            shape = (*pieces[0].shape[:2], self.kv.shape[2])
            shard = pieces[0].new_zeros(shape, dtype=accumulation_dtype(self.kv.dtype))
            place(pieces, ranges, self._columns(shard), adds=(True, True))
            yield shard

    def _columns(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, views."""
        k, v = shard.split([self.call.num_kv_heads * dim for dim in self.call.dims], dim=2)
        return k, v

    def _spread_channels(self) -> list[tuple[Range, ...]]:
        """Of keys and values: the channels that each rank of the Ulysses group attends with."""
        return [self.call.split.kv_channels(dim) for dim in self.call.dims]

    def _of(self, x: Tensor, piece: Slice) -> Tensor:
        """The tokens of a slice, of its row or of all rows: a view."""
        tokens = x[piece.start : piece.stop]
        return tokens[:, piece.row : piece.row + 1] if self.packed else tokens


NOTHING = Slice(0, 0, 0)
