"""How documents are put together: into rows without padding, and into bins of equal cost. Pure arithmetic.

Sizes are tokens; costs are whatever `Cost` gives. What comes out are lists of indices of what went in.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

Bins = list[list[int]]


def pack(sizes: Sequence[int], capacity: int) -> Bins:
    """Pack by best-fit decreasing: the longest first, each into the fullest row that still has room for it.

    At most 11/9 of the fewest rows, and a few (Johnson, "Near-optimal bin packing algorithms", 1973). O(n log n), but
    for moving the entries of a list. Raises `ValueError` for a document that fits in no row.
    """
    if sizes and max(sizes) > capacity:
        raise ValueError(f"A document of {max(sizes)} tokens does not fit in a row of {capacity}.")
    rows: Bins = []
    free: list[tuple[int, int]] = []
    """(room, row), sorted."""
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        found = bisect_left(free, (sizes[index], -1))
        room, row = free.pop(found) if found < len(free) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        insort(free, (room - sizes[index], row))
    return rows


def spread(costs: Sequence[float], sizes: Sequence[int], num_bins: int, capacity: int) -> Bins | None:
    """Spread the costliest first, each into the bin of the least cost so far among those that have room for it.

    The greedy of "WLB-LLM" (arXiv:2503.17924, algorithm 1) without delaying documents to another step. The bins come
    out costliest first; None if something fits in none of them. O(n log n), as what costs more mostly is larger too: a
    bin that is passed over for want of room waits until sizes are small enough.
    """
    bins: Bins = [[] for _ in range(num_bins)]
    room = [capacity] * num_bins
    least = [(0.0, number) for number in range(num_bins)]
    waiting: list[tuple[int, float, int]] = []
    """(-room, cost, bin)"""
    for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        while waiting and -waiting[0][0] >= sizes[index]:
            heapq.heappush(least, heapq.heappop(waiting)[1:])
        while least and room[least[0][1]] < sizes[index]:
            cost, number = heapq.heappop(least)
            heapq.heappush(waiting, (-room[number], cost, number))
        if not least:
            return None
        cost, number = least[0]
        bins[number].append(index)
        room[number] -= sizes[index]
        heapq.heapreplace(least, (cost + costs[index], number))
    total = {number: cost for cost, number in least} | {number: cost for _, cost, number in waiting}
    return [bins[number] for number in sorted(total, key=total.__getitem__, reverse=True)]


def balanced_rows(costs: Sequence[float], sizes: Sequence[int], capacity: int) -> Bins:
    """Fill as few rows as best-fit decreasing takes, or a few hundredths more until they fit, of about equal cost.

    Best fit alone puts long documents with long ones, which cost far more than short ones in as many tokens.
    """
    num_rows = len(pack(sizes, capacity))
    while (rows := spread(costs, sizes, num_rows, capacity)) is None:
        num_rows += -(-num_rows // 25)
    return rows
