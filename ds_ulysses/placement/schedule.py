"""Which queries meet which keys, at which step of the ring, under which mask: pure integers.

One schedule drives ring, all_gather and hierarchical attention, the byte prediction and the load statistics. Ring rank
g takes a step for each distance d: the keys and values that it needs of ring rank g - d arrive, and those that ring
rank g + d needs of its own leave. Only what somebody sees travels, and steps in which nothing travels do not exist: a
causal zigzag moves three quarters of all keys, a window only the neighbouring ones.

Within a step, a `Pair` is one kernel call: a query range of the shard and a key range of what arrived, cut so that
every query sees a key and every key is seen, with the mask as flash-attn writes it, aligned at the bottom right.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ds_ulysses.placement.layout import NOT_A_DOCUMENT, Ints, Pieces, cut, lay_out


@dataclass(frozen=True)
class Geometry:
    """All the facts that a schedule depends on."""

    num_tokens: int
    """Of a row."""
    ring_size: int
    layout: str = "contiguous"
    left: int = -1
    """Token i sees token j of its document if -left <= j - i <= right; -1 means no limit."""
    right: int = 0
    documents: bytes | None = None
    """What `pack_documents` returns. None: every row is one document, and one schedule serves them all."""
    num_rows: int = 1
    num_parts: int = 1
    """Shards in which a ring rank's keys leave: 1, or the ranks of its Ulysses group if each sends its own."""

    @property
    def tokens_per_ring_rank(self) -> int:
        """The tokens of a row that each ring rank holds."""
        return self.num_tokens // self.ring_size

    def without_mask(self) -> Geometry:
        """Return the layout, which layers with and without a window share, and both ways of sending keys."""
        return replace(self, left=-1, right=0, num_parts=1)


def pack_documents(documents: Iterable[tuple[int, int, int]]) -> bytes:
    """Pack (row, start, stop) of documents as 32-bit integers: quick to compare, and what a tensor of them holds."""
    return b"".join(struct.pack("3i", *document) for document in documents)


class Slice(NamedTuple):
    """Neighbouring tokens of a row in a rank's buffer."""

    row: int
    start: int
    stop: int


def num_tokens(slices: Iterable[Slice]) -> int:
    """Count the tokens of all slices together."""
    return sum(piece.stop - piece.start for piece in slices)


class Pair(NamedTuple):
    """The queries [q_start, q_stop) of a row of the shard that see keys [k_start, k_stop) of the block, masked."""

    row: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    left: int
    right: int

    @property
    def num_seen(self) -> int:
        """The number of query-key pairs that the mask leaves."""
        num_q, num_k = self.q_stop - self.q_start, self.k_stop - self.k_start
        too_new = _triangle(num_q - 1 - self.right, num_q) if self.right >= 0 else 0
        too_old = _triangle(num_k - 1 - self.left, num_q) if self.left >= 0 else 0
        return num_q * num_k - too_new - too_old


class Step(NamedTuple):
    """The work of a ring rank at one distance."""

    distance: int
    send: tuple[tuple[Slice, ...], ...]
    """Of each part of the own keys: what the ring rank at +distance needs."""
    receive: tuple[int, ...]
    """Tokens that come of each part of the ring rank at -distance. Together, in this order, they are the block."""
    pairs: tuple[Pair, ...]
    parked: bool
    """Nothing comes later, so that the backward finds this block where it was received,"""
    parked_there: bool
    """and the one at +distance finds what is sent to it."""


# Packed batches have a schedule each, and those of thousands of documents are large: only a few are kept.
@lru_cache(maxsize=8)
def make_schedule(geometry: Geometry, ring_rank: int) -> tuple[Step, ...]:
    """Return the steps of a ring rank, its own keys first. All take the same, so that messages pair up in order."""
    steps = []
    for distance in _distances(geometry):
        source, target = (ring_rank - distance) % geometry.ring_size, (ring_rank + distance) % geometry.ring_size
        needed, pairs = _meet(geometry, ring_rank, source)
        receive = tuple(map(num_tokens, needed))
        parked, parked_there = (distance > 0 and distance == _farthest(geometry, rank) for rank in (ring_rank, target))
        steps.append(Step(distance, _meet(geometry, target, ring_rank).needed, receive, pairs, parked, parked_there))
    return tuple(steps)


@lru_cache(maxsize=8)
def gathered_pairs(geometry: Geometry, ring_rank: int) -> tuple[Pair, ...]:
    """Return the pairs of a ring rank with the keys of all, in the order of the row. No query is in two of them."""
    everything = _held(replace(geometry.without_mask(), ring_size=1), 0, 1)
    return _merge(_encounters(_held(geometry.without_mask(), ring_rank, 1), everything, geometry))


@lru_cache(maxsize=8)
def held_by(geometry: Geometry) -> list[Pieces]:
    """Return the pieces of each ring rank."""
    if geometry.documents is None:
        documents = np.array([[0, 0, geometry.num_tokens]])
    else:
        documents = np.frombuffer(geometry.documents, dtype=np.int32).reshape(-1, 3).astype(np.int64)
    return lay_out(geometry.num_tokens, geometry.num_rows, documents, geometry.ring_size, geometry.layout)


@lru_cache(maxsize=64)
def _distances(geometry: Geometry) -> list[int]:
    """Distances over which some ring rank needs something, and 0. Late ring ranks need most: they are asked first."""
    size = geometry.ring_size
    far = (d for d in range(1, size) if any(_meet(geometry, g, (g - d) % size).pairs for g in reversed(range(size))))
    return [0, *far]


def _farthest(geometry: Geometry, ring_rank: int) -> int:
    """The greatest distance over which a ring rank needs something."""
    size = geometry.ring_size
    return next((d for d in reversed(range(size)) if _meet(geometry, ring_rank, (ring_rank - d) % size).pairs), 0)


class _Meeting(NamedTuple):
    """Queries of one ring rank and keys of another: what is needed of each part of the keys, and the calls."""

    needed: tuple[tuple[Slice, ...], ...]
    pairs: tuple[Pair, ...]


class _Held(NamedTuple):
    """Pieces of documents, by document; the part of the keys that each is in, and where in its row of it."""

    pieces: Pieces
    part: Ints
    at: Ints


class _Encounters(NamedTuple):
    """Pairs as columns, their keys as places in the buffer of a part."""

    row: Ints
    q_start: Ints
    q_stop: Ints
    k_start: Ints
    k_stop: Ints
    left: Ints
    right: Ints
    part: Ints


@lru_cache(maxsize=256)
def _meet(geometry: Geometry, q_rank: int, k_rank: int) -> _Meeting:
    # Parts of one row follow one another in the block too, so that calls may reach over their borders.
    split = geometry.num_parts if geometry.num_rows > 1 else 1
    found = _encounters(
        _held(geometry.without_mask(), q_rank, 1), _held(geometry.without_mask(), k_rank, split), geometry
    )
    # All buffers end to end, with a gap between rows, so that one number says part, row and place.
    stride = geometry.tokens_per_ring_rank + 1
    base = (found.part * geometry.num_rows + found.row) * stride
    starts, stops = _union(base + found.k_start, base + found.k_stop)
    begins = np.cumsum(stops - starts) - (stops - starts)
    home = np.searchsorted(starts, base + found.k_start, side="right") - 1
    shift = begins[home] - (starts[home] - base) if len(starts) else base
    pairs = _merge(found._replace(k_start=found.k_start + shift, k_stop=found.k_stop + shift))
    part, rows = np.divmod(starts // stride, geometry.num_rows)
    slices = map(Slice, rows.tolist(), (starts % stride).tolist(), (stops - starts + starts % stride).tolist())
    needed: list[list[Slice]] = [[] for _ in range(geometry.num_parts)]
    size = geometry.tokens_per_ring_rank // (geometry.num_parts // split)
    for owner, (row, start, stop) in zip(part.tolist(), slices, strict=True):
        for number in range(start // size, -(-stop // size)):
            at = number * size
            needed[owner + number].append(Slice(row, max(start - at, 0), min(stop - at, size)))
    return _Meeting(tuple(map(tuple, needed)), pairs)


@lru_cache(maxsize=128)
def _held(geometry: Geometry, ring_rank: int, num_parts: int) -> _Held:
    parts = cut(held_by(geometry)[ring_rank], geometry.tokens_per_ring_rank, num_parts)
    pieces = Pieces(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    part = np.repeat(np.arange(num_parts), [len(shard.row) for shard in parts])
    at = np.concatenate([shard.at for shard in parts])
    order = np.argsort(pieces.document, kind="stable")
    order = order[pieces.document[order] != NOT_A_DOCUMENT]
    return _Held(pieces.take(order), part[order], at[order])


def _encounters(queries: _Held, keys: _Held, mask: Geometry) -> _Encounters:
    """Each query piece with each key piece that it sees anything of.

    Both are cut to what sees and is seen; then the mask is expressed in offsets from the bottom right.
    """
    first = np.searchsorted(keys.pieces.document, queries.pieces.document)
    count = np.searchsorted(keys.pieces.document, queries.pieces.document, side="right") - first
    i = np.repeat(np.arange(len(first)), count)
    j = np.arange(len(i)) - np.repeat(np.cumsum(count) - count, count) + first[i]
    (row, _, a, b), (_, _, c, d) = queries.pieces.take(i), keys.pieces.take(j)
    shift_q, shift_k = queries.at[i] - a, keys.at[j] - c
    far = np.iinfo(np.int64).max // 4
    left, right = (limit if limit >= 0 else far for limit in (mask.left, mask.right))
    c, d = np.maximum(c, a - left), np.minimum(d, b + right)
    a, b = np.maximum(a, c - right), np.minimum(b, d + left)
    seen = (a < b) & (c < d)
    # A limit that no pair reaches is none: kernels are faster without.
    to_left = np.where(left - (b - d) >= d - c - 1, -1, left - (b - d))
    to_right = np.where(right + (b - d) >= b - a - 1, -1, right + (b - d))
    columns = (row, a + shift_q, b + shift_q, c + shift_k, d + shift_k, to_left, to_right, keys.part[j])
    return _Encounters(*(column[seen] for column in columns))


def _union(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """The intervals that these cover, in order."""
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(stops[order])
    new = np.ones(len(starts), dtype=bool)
    new[1:] = starts[1:] > reach[:-1]
    last = np.ones(len(starts), dtype=bool)
    last[:-1] = new[1:]
    return starts[new], reach[last]


def _merge(found: _Encounters) -> tuple[Pair, ...]:
    """Join calls that one kernel call can do: first over the keys of the same queries, then over queries.

    Keys that all queries see may stand before keys with any right limit: the diagonal stays at the bottom right.
    """
    if not len(found.row):
        return ()
    first, second = (_Encounters(*(column[part] for column in found)) for part in (np.s_[:-1], np.s_[1:]))
    same_queries = (first.row == second.row) & (first.q_start == second.q_start) & (first.q_stop == second.q_stop)
    unlimited = (first.left < 0) & (first.right < 0) & (second.left < 0)
    joins = same_queries & (first.k_stop == second.k_start) & unlimited
    begins, ends = np.concatenate([[True], ~joins]), np.concatenate([~joins, [True]])
    columns = [column[begins if name == "k_start" else ends].tolist() for name, column in found._asdict().items()]
    joined: list[Pair] = []
    for pair in map(Pair._make, zip(*columns[:-1], strict=True)):
        if joined and (both := _join_queries(joined[-1], pair)):
            joined[-1] = both
        else:
            joined.append(pair)
    return tuple(joined)


def _join_queries(first: Pair, second: Pair) -> Pair | None:
    """Queries that follow one another, with the same keys in full, or with a causal diagonal that goes on."""
    follows = (first.row, first.q_stop, first.k_start) == (second.row, second.q_start, second.k_start)
    if not follows or first.left >= 0 or second.left >= 0:
        return None
    full = (first.right, second.right, first.k_stop) == (-1, -1, second.k_stop)
    causal = _is_causal(first) and _is_causal(second) and second.k_stop - first.k_stop == second.q_stop - first.q_stop
    return second._replace(q_start=first.q_start, right=-1 if full else 0) if full or causal else None


def _is_causal(pair: Pair) -> bool:
    """Also a single query that sees all keys, whose limit was found to be none."""
    return pair.left < 0 and (pair.right == 0 or pair.q_stop - pair.q_start == 1)


def _triangle(side: int, num_rows: int) -> int:
    """side + (side - 1) + ... over at most `num_rows` rows."""
    if side <= 0:
        return 0
    rest = max(side - num_rows, 0)
    return (side * (side + 1) - rest * (rest + 1)) // 2
