"""Which rank attends with which heads: pure integers, for any number of heads, KV heads and ranks.

Query heads are cut into contiguous, nearly equal ranges. A rank receives each KV head that its query heads
need exactly once; a KV head whose group is cut by a range border goes to both sides. With 9 query heads,
3 KV heads (groups of 3) and 2 ranks:

    query heads   0 1 2 | 3 4 5 | 6 7 8
    rank 0        0 1 2   3 4             KV heads 0, 1
    rank 1                    5   6 7 8   KV heads 1, 2
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

MAX_STAGES = 4
"""Two stages are in memory at once: half of all keys and values, with three quarters of their travel hidden."""

Range = tuple[int, int]
"""Half-open: (start, stop)."""


class HeadRun(NamedTuple):
    """Neighbouring local query heads that share local KV heads evenly: one kernel call without expansion."""

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int

    @property
    def size_per_kv(self) -> int:
        """The query heads per KV head."""
        return (self.q_stop - self.q_start) // (self.kv_stop - self.kv_start)


class HeadGroup(NamedTuple):
    """A part of a rank's heads that travels and is computed together. Ranges are those of the model's heads."""

    q_range: Range
    kv_range: Range
    """KV heads that no earlier group brought."""
    runs: tuple[tuple[int, HeadRun], ...]
    """The group that brought the KV heads, and the run: query heads local to this group, KV heads to that one."""

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of query and KV heads that it brings."""
        return self.q_range[1] - self.q_range[0], self.kv_range[1] - self.kv_range[0]


@dataclass(frozen=True)
class HeadSplit:
    """The heads of one attention layer over `sp_size` ranks. Raises `ValueError` if groups are uneven."""

    num_heads: int
    num_kv_heads: int
    sp_size: int

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads over {self.num_kv_heads} KV heads: grouped-query attention needs a "
                f"whole number of query heads per KV head."
            )

    @property
    def queries_per_kv(self) -> int:
        """The query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def q_range(self, rank: int) -> Range:
        """Return the query heads of a rank; the first `num_heads % sp_size` ranks hold one more, some may hold none."""
        base, extra = divmod(self.num_heads, self.sp_size)
        start = rank * base + min(rank, extra)
        return start, start + base + (rank < extra)

    def kv_range(self, rank: int) -> Range:
        """Return the KV heads that the query heads of a rank need."""
        start, stop = self.q_range(rank)
        if start == stop:
            return 0, 0
        return start // self.queries_per_kv, (stop - 1) // self.queries_per_kv + 1

    def counts(self, rank: int) -> tuple[int, int]:
        """Count the query and KV heads of a rank."""
        (q_start, q_stop), (kv_start, kv_stop) = self.q_range(rank), self.kv_range(rank)
        return q_stop - q_start, kv_stop - kv_start

    def runs(self, rank: int) -> list[HeadRun]:
        """Cut a rank's heads where its KV groups are cut: at most a partial, the whole and a partial group.

        Indices are local to the rank. The KV ranges of the runs are disjoint and cover the rank's KV heads, so
        one run means that the rank's heads are grouped evenly.
        """
        start, stop = self.q_range(rank)
        kv_start, kv_stop = self.kv_range(rank)
        sizes = [
            min(stop, (kv + 1) * self.queries_per_kv) - max(start, kv * self.queries_per_kv)
            for kv in range(kv_start, kv_stop)
        ]
        runs, q_done, kv_done = [], 0, 0
        for size, same in groupby(sizes):
            num_kv = len(list(same))
            runs.append(HeadRun(q_done, q_done + size * num_kv, kv_done, kv_done + num_kv))
            q_done, kv_done = q_done + size * num_kv, kv_done + num_kv
        return runs

    def groups(self, rank: int, num_groups: int) -> list[HeadGroup]:
        """Cut a rank's query heads into nearly equal groups; a KV head comes with the first group that needs it."""
        start, stop = self.q_range(rank)
        cuts = [start + (stop - start) * i // num_groups for i in range(num_groups + 1)]
        brought: dict[int, tuple[int, int]] = {}
        groups = []
        for index, (first, last) in enumerate(pairwise(cuts)):
            needed = range(first // self.queries_per_kv, -(-last // self.queries_per_kv)) if first < last else range(0)
            new = [kv for kv in needed if kv not in brought]
            brought |= {kv: (index, place) for place, kv in enumerate(new)}
            runs, done = [], 0
            for kv in needed:
                size = min(last, (kv + 1) * self.queries_per_kv) - max(first, kv * self.queries_per_kv)
                owner, place = brought[kv]
                runs.append((owner, HeadRun(done, done + size, place, place + 1)))
                done += size
            groups.append(HeadGroup((first, last), (new[0], new[-1] + 1) if new else (0, 0), tuple(_join(runs))))
        return groups

    @property
    def num_held(self) -> int:
        """The number of KV heads of all ranks; more than `num_kv_heads` if several hold the same one."""
        return sum(self.counts(rank)[1] for rank in range(self.sp_size))

    @property
    def shares_kv_heads(self) -> bool:
        """Whether several ranks need the same KV head, so that its gradient is a sum over them."""
        return self.num_held > self.num_kv_heads

    @property
    def imbalance(self) -> float:
        """The query heads of the busiest rank over the mean: 1.0 is even."""
        return -(-self.num_heads // self.sp_size) * self.sp_size / self.num_heads

    def q_channels(self, dim: int) -> tuple[Range, ...]:
        """Return the channels (head * dim + i) of q, or of the output, that each rank attends with."""
        return tuple(_times(self.q_range(rank), dim) for rank in range(self.sp_size))

    def kv_channels(self, dim: int) -> tuple[Range, ...]:
        """Return the channels (head * dim + i) of k or v that each rank attends with."""
        return tuple(_times(self.kv_range(rank), dim) for rank in range(self.sp_size))


def _join(runs: list[tuple[int, HeadRun]]) -> list[tuple[int, HeadRun]]:
    """Neighbours of one owner and one group size become one run."""
    joined: list[tuple[int, HeadRun]] = []
    for owner, run in runs:
        if joined and joined[-1][0] == owner and joined[-1][1].size_per_kv == run.size_per_kv:
            joined[-1] = owner, joined[-1][1]._replace(q_stop=run.q_stop, kv_stop=run.kv_stop)
        else:
            joined.append((owner, run))
    return joined


def _times(bounds: Range, factor: int) -> Range:
    return bounds[0] * factor, bounds[1] * factor


@lru_cache
def split_heads(num_heads: int, num_kv_heads: int, sp_size: int) -> HeadSplit:
    """Return the one `HeadSplit` of these numbers, so that its tables are built once, not in every layer."""
    return HeadSplit(num_heads, num_kv_heads, sp_size)


def stages(num_kv_heads: int) -> list[Range]:
    """Return the KV heads of each stage."""
    count = min(MAX_STAGES, num_kv_heads)
    return [(i * num_kv_heads // count, (i + 1) * num_kv_heads // count) for i in range(count)]
