"""Which channels of each tensor go to which rank of an exchange: worked out once, and named by a string.

An op that torch.compile does not look into can be given a string, and finds the table that it names.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from ds_ulysses.placement import Range

ChannelRanges = Sequence[Sequence[Range]]
"""[tensor][rank]: the channels of a tensor that a rank needs. Ranges of different ranks may overlap."""


class ChannelTable:
    """The channels of each tensor that each rank of an exchange needs. Immutable; widths are in channels."""

    def __init__(self, ranges: ChannelRanges) -> None:
        self.ranges = tuple(tuple(row) for row in ranges)
        self.name = "|".join(" ".join(f"{start},{stop}" for start, stop in row) for row in self.ranges)
        self.by_rank = tuple(zip(*self.ranges, strict=True))
        self.widths = tuple(sum(stop - start for start, stop in bounds) for bounds in self.by_rank)
        """Of each rank, all tensors together."""
        self.totals = tuple(max(stop for _, stop in row) for row in self.ranges)
        """Of each tensor, all ranks together."""
        self.overlaps = tuple(map(_overlap, self.ranges))
        """Whether several ranks need the same channels of a tensor, so that what comes back must be summed."""


@lru_cache(maxsize=1024)
def table_named(name: str) -> ChannelTable:
    """Return the table that a `ChannelTable.name` stands for."""
    rows = (row.split(" ") for row in name.split("|"))
    ranges = [[(int(start), int(stop)) for start, stop in (bounds.split(",") for bounds in row)] for row in rows]
    return ChannelTable(ranges)


def _overlap(row: Sequence[Range]) -> bool:
    filled = [bounds for bounds in row if bounds[0] < bounds[1]]
    return any(left[1] > right[0] for left, right in pairwise(filled))
