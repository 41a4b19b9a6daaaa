"""The table of one kernel call over a packed row: which neighbouring queries see which neighbouring keys.

    queries   0 1 2 3 4 5 6        keys   0 1 2 3 4 5        two documents and a token of padding
    borders   0     3     6 7             0     3     6 6    a gap is a segment of no keys (or of no queries)

The borders are flash-attn's cu_seqlens: ascending, from 0 to the number of tokens, as many for queries as for keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """The queries [q_start, q_stop) that see keys [k_start, k_stop), which nobody else sees."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


class Segments:
    """The segments of a table, one after another, gaps filled. Immutable, and shared by all layers of a batch."""

    def __init__(self, segments: Iterable[Segment], num_queries: int, num_keys: int) -> None:
        """`segments` ascend and do not overlap, in queries as in keys; none is empty."""
        self.segments = tuple(segments)
        q, k = [0], [0]
        for segment in (*self.segments, Segment(num_queries, num_queries, num_keys, num_keys)):
            assert segment.q_start >= q[-1] and segment.k_start >= k[-1], "segments overlap or do not ascend"  # noqa: PT018
            if segment.q_start > q[-1]:
                q.append(segment.q_start)
                k.append(k[-1])
            if segment.k_start > k[-1]:
                q.append(q[-1])
                k.append(segment.k_start)
            if segment.q_stop > segment.q_start:
                q.append(segment.q_stop)
                k.append(segment.k_stop)
        self.q_borders, self.k_borders = tuple(q), tuple(k)
        self.q_sizes, self.k_sizes = ([stop - start for start, stop in pairwise(x)] for x in (q, k))
        self.max_q, self.max_k = max(self.q_sizes, default=0), max(self.k_sizes, default=0)
        self.fills_queries = num_queries == sum(s.q_stop - s.q_start for s in self.segments)
        self.fills_keys = num_keys == sum(s.k_stop - s.k_start for s in self.segments)
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def cu_seqlens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the borders of queries and of keys, int32, copied to a device once."""
        if device not in self._on_device:
            borders = torch.tensor([self.q_borders, self.k_borders], dtype=torch.int32)
            self._on_device[device] = tuple(borders.to(device, non_blocking=True))
        return self._on_device[device]
