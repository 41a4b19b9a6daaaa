"""Pairs of a schedule become few kernel calls, which span little more than what attends."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ulysses.mixers.softmax.kernel_calls import SMALL_GAP, Rows, Span, spans_of
from ds_ulysses.placement import Geometry, Pair, gathered_pairs, make_schedule, pack_documents

TOKENS, RING = 131_072, 4
RING_ROWS = Rows(packed=True, joined=True, may_cross=True)
WRITTEN = Rows(packed=True, joined=False, may_cross=False)
Met = tuple[int, int, int]
"""A row, a query and a key that meet."""


def documents_of(count: int) -> bytes:
    cuts = [0, *sorted(random.Random(count).sample(range(1, TOKENS), count - 1)), TOKENS]
    return pack_documents((0, cuts[i], cuts[i + 1]) for i in range(count))


@pytest.mark.parametrize("window", [None, 128, 4096])
@pytest.mark.parametrize("count", [16, 136, 1000])
def test_spans_of_a_ring(count: int, window: int | None) -> None:
    """Without a window, few calls a step. With one, gaps are many times what attends, and are not computed."""
    for ring_rank in range(RING):
        left = -1 if window is None else window - 1
        for step in make_schedule(Geometry(TOKENS, RING, "zigzag", left, 0, documents_of(count)), ring_rank):
            spans = spans_of(step.pairs, RING_ROWS)
            attending = sum(pair.q_stop - pair.q_start for pair in step.pairs)
            spanned = sum(span.queries.stop - span.queries.start for span in spans)
            assert spanned <= 2 * attending + SMALL_GAP * len(step.pairs)
            assert len(spans) <= (len(step.pairs) if window else 6)


def met(row: int, queries: slice, keys: slice, left: int, right: int) -> Iterator[Met]:
    """The contract of a kernel's mask, pair by pair."""
    offset = (keys.stop - keys.start) - (queries.stop - queries.start)
    for i in range(queries.stop - queries.start):
        for j in range(keys.stop - keys.start):
            distance = j - i - offset
            if (left < 0 or distance >= -left) and (right < 0 or distance <= right):
                yield row, queries.start + i, keys.start + j


def met_in_pairs(pairs: tuple[Pair, ...]) -> Counter[Met]:
    return Counter(
        one
        for p in pairs
        for one in met(p.row, slice(p.q_start, p.q_stop), slice(p.k_start, p.k_stop), p.left, p.right)
    )


def met_in_spans(spans: tuple[Span, ...]) -> Counter[Met]:
    found: Counter[Met] = Counter()
    for span in spans:
        if span.segments is None:
            found.update(met(span.row, span.queries, span.keys, span.left, span.right))
            continue
        q, k = span.queries.start, span.keys.start
        for a, b, c, d in span.segments.segments:
            found.update(met(span.row, slice(q + a, q + b), slice(k + c, k + d), span.left, span.right))
    return found


@pytest.mark.parametrize(("limit", "joins"), [(2, False), (3, True)])
def test_a_limit_that_does_not_reach_a_pair_joins_it(limit: int, joins: bool) -> None:
    """4 keys are all within 3 to the left of the last query, and not within 2; likewise to the right."""
    for first in (Pair(0, 0, 9, 0, 9, limit, 0), Pair(0, 0, 9, 0, 9, -1, limit)):
        other = Pair(0, 9, 13, 9, 13, -1, 0 if first.right == 0 else -1)
        for rows in (RING_ROWS, WRITTEN):
            assert len(spans_of((first, other), rows)) == (1 if joins else 2)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_who_meets_whom_stays_the_same(data: st.DataObject) -> None:
    """For any documents, rows, windows and layouts, on every rank and step: each pair once, under whatever mask."""
    ring, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    tokens = ring * data.draw(st.integers(2, 10))
    documents = []
    for row in range(rows):
        cuts = sorted(data.draw(st.sets(st.integers(0, tokens), max_size=8)))
        documents += [(row, a, b) for a, b in pairwise(cuts)]
    left, right = data.draw(st.integers(-1, 6)), data.draw(st.sampled_from([0, 0, -1, 2]))
    layout = data.draw(st.sampled_from(["zigzag", "contiguous"]))
    geometry = Geometry(tokens, ring, layout, left, right, pack_documents(documents), rows)
    for ring_rank in range(ring):
        for step in make_schedule(geometry, ring_rank):
            assert met_in_spans(spans_of(step.pairs, RING_ROWS)) == met_in_pairs(step.pairs)
        pairs = gathered_pairs(geometry, ring_rank)
        spans = spans_of(pairs, WRITTEN)
        assert met_in_spans(spans) == met_in_pairs(pairs)
        for places in ("queries", "keys") if ring == 1 else ("queries",):
            of_calls = [(span.row, getattr(span, places)) for span in spans]
            written = Counter((row, i) for row, place in of_calls for i in range(place.start, place.stop))
            assert all(times == 1 for times in written.values()), f"calls write over one another's {places}"
