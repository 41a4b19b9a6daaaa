"""Pairs of a schedule become few kernel calls, which span little more than what attends."""

from __future__ import annotations

import random

import pytest

from ds_ulysses.mixers.softmax.kernel_calls import SMALL_GAP, Rows, spans_of
from ds_ulysses.placement import Geometry, make_schedule, pack_documents

TOKENS, RING = 131_072, 4
RING_ROWS = Rows(packed=True, joined=True, may_cross=True)


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
