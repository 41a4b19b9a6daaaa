"""Layouts and plans against a table of who sees whom, for every rank, in one process."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ulysses.placement.layout import cut, token_index
from ds_ulysses.placement.schedule import Geometry, Pair, gathered_pairs, held_by, make_schedule, pack_documents

LAYOUTS = ("contiguous", "zigzag")


def pack(*rows: list[int]) -> tuple[bytes, int]:
    """Documents of these lengths, one after another, a negative one being a gap, and the number of rows.

    Rows are as long as the longest.
    """
    documents = []
    for row, lengths in enumerate(rows):
        borders = accumulate(map(abs, lengths), initial=0)
        documents += [(row, a, b) for (a, b), n in zip(pairwise(borders), lengths, strict=True) if n > 0]
    return pack_documents(documents), len(rows)


def owners(geometry: Geometry) -> np.ndarray:
    """[rows, T]: the document of each token, -1 for none."""
    table = np.full((geometry.num_rows, geometry.num_tokens), -1 if geometry.documents is not None else 0)
    documents = np.frombuffer(geometry.documents or b"", dtype=np.int32).reshape(-1, 3)
    for index, (row, start, stop) in enumerate(documents):
        table[row, start:stop] = index
    return table


def seen(geometry: Geometry) -> np.ndarray:
    """[rows, T, T]: which token sees which."""
    owner, place = owners(geometry), np.arange(geometry.num_tokens)
    distance = place[None, :] - place[:, None]
    table = (owner[:, :, None] == owner[:, None, :]) & (owner >= 0)[:, :, None]
    if geometry.left >= 0:
        table &= distance >= -geometry.left
    if geometry.right >= 0:
        table &= distance <= geometry.right
    return table


def mask_of(pair: Pair) -> np.ndarray:
    """[queries, keys] of a kernel call, as the kernels' contract says."""
    q, k = pair.q_stop - pair.q_start, pair.k_stop - pair.k_start
    distance = np.arange(k)[None] - np.arange(q)[:, None] - (k - q)
    allowed = np.ones((q, k), dtype=bool)
    if pair.left >= 0:
        allowed &= distance >= -pair.left
    if pair.right >= 0:
        allowed &= distance <= pair.right
    assert allowed.any(axis=0).all(), "a key that nobody sees reached a kernel"
    assert allowed.any(axis=1).all(), "a query that sees nothing reached a kernel"
    assert allowed.sum() == pair.num_seen
    return allowed


def places(geometry: Geometry, ring_rank: int) -> np.ndarray:
    """[n, rows]: the tokens of a ring rank."""
    return token_index(held_by(geometry)[ring_rank], geometry.num_rows)


def check(geometry: Geometry) -> None:
    """All calls of all ranks together are the table, each entry once; what is sent is what is received."""
    found = np.zeros((geometry.num_rows, geometry.num_tokens, geometry.num_tokens), dtype=int)
    gathered = found.copy()
    ring = range(geometry.ring_size)
    part_size = geometry.tokens_per_ring_rank // geometry.num_parts
    for rank in ring:
        mine = places(geometry, rank)
        for step in make_schedule(geometry, rank):
            source = (rank - step.distance) % geometry.ring_size
            theirs = places(geometry, source)
            sent = next((s.send for s in make_schedule(geometry, source) if s.distance == step.distance), ())
            block = [
                (piece.row, theirs[part * part_size + at, piece.row])
                for part, pieces in enumerate(sent)
                for piece in pieces
                for at in range(piece.start, piece.stop)
            ]
            assert sum(step.receive) == len(block)
            for pair in step.pairs:
                keys = block[pair.k_start : pair.k_stop]
                assert {row for row, _ in keys} == {pair.row}
                queries = mine[pair.q_start : pair.q_stop, pair.row]
                found[pair.row][np.ix_(queries, [key for _, key in keys])] += mask_of(pair)
        done = np.zeros((geometry.num_rows, len(mine)), dtype=int)
        for pair in gathered_pairs(geometry, rank):
            queries = mine[pair.q_start : pair.q_stop, pair.row]
            gathered[pair.row][np.ix_(queries, np.arange(pair.k_start, pair.k_stop))] += mask_of(pair)
            done[pair.row, pair.q_start : pair.q_stop] += 1
        assert done.max(initial=0) <= 1
    assert (found == seen(geometry)).all()
    assert (gathered == seen(geometry)).all()


WINDOWS = [(-1, 0), (-1, -1), (0, 0), (2, 0), (5, 0), (6, 0), (7, 0), (100, 0), (2, 3), (-1, 4), (3, -1)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ring_size", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize(("left", "right"), WINDOWS)
def test_every_visible_pair_is_computed_once(ring_size: int, left: int, right: int, layout: str) -> None:
    for tokens in (ring_size, 6 * ring_size, 7 * ring_size):
        check(Geometry(tokens, ring_size, layout, left, right))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_documents_of_any_length(data: st.DataObject) -> None:
    ring_size, parts = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8])), data.draw(st.integers(1, 4))
    left, right = data.draw(st.sampled_from(WINDOWS))
    tokens = ring_size * parts * data.draw(st.integers(1, 5))
    rows = []
    for _ in range(data.draw(st.integers(1, 3))):
        lengths: list[int] = []
        while (rest := tokens - sum(map(abs, lengths))) > 0:
            length = data.draw(st.integers(1, rest))
            lengths.append(length if data.draw(st.booleans()) else -length)
        rows.append(lengths)
    layout = data.draw(st.sampled_from(LAYOUTS))
    documents, num_rows = pack(*rows)
    check(Geometry(tokens, ring_size, layout, left, right, documents, num_rows, num_parts=parts))


def num_seen(geometry: Geometry, rank: int) -> int:
    return sum(pair.num_seen for step in make_schedule(geometry, rank) for pair in step.pairs)


@pytest.mark.parametrize("ring_size", range(1, 17))
def test_zigzag_gives_all_ranks_the_same_causal_work(ring_size: int) -> None:
    """Exactly if 2R divides the length, otherwise within one row of the score matrix."""
    for tokens in range(ring_size, 12 * ring_size, ring_size):
        work = [num_seen(Geometry(tokens, ring_size, "zigzag"), rank) for rank in range(ring_size)]
        mean = tokens * (tokens + 1) / 2 / ring_size
        assert sum(work) == ring_size * mean
        assert max(work) - mean < tokens
        if tokens % (2 * ring_size) == 0:
            assert max(work) == mean


@pytest.mark.parametrize("ring_size", [2, 3, 4, 8])
def test_zigzag_spreads_the_remainder_of_each_document(ring_size: int) -> None:
    """No document is padded, all ranks hold as much, and each document weighs alike within a row."""
    lengths = [13, 1, 5, 29, 2, 3, 11, 16 * ring_size]
    lengths.append(-sum(lengths) % ring_size or ring_size)
    documents, num_rows = pack(lengths)
    geometry = Geometry(sum(lengths), ring_size, "zigzag", documents=documents, num_rows=num_rows)
    for rank in range(ring_size):
        assert len(places(geometry, rank)) == sum(lengths) // ring_size
    held = held_by(geometry)
    for index, length in enumerate(lengths):
        of_document = [segments.take(segments.document == index) for segments in held]
        counts = [segments.num_tokens.sum() for segments in of_document]
        assert max(counts) - min(counts) <= 1
        start = sum(lengths[:index])
        work = [
            sum(i - start + 1 for a, b in zip(s.start, s.stop, strict=True) for i in range(a, b)) for s in of_document
        ]
        assert max(work) - length * (length + 1) / 2 / ring_size < length


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("ring_size", [2, 4, 8])
def test_one_document_costs_one_kernel_call_a_step(ring_size: int, parts: int) -> None:
    """Also if its keys come in parts."""
    for layout in LAYOUTS:
        for rank in range(ring_size):
            for step in make_schedule(Geometry(12 * ring_size, ring_size, layout, num_parts=parts), rank):
                assert len(step.pairs) <= 1
                assert all(pair.right == (0 if step.distance == 0 else -1) for pair in step.pairs)


def sent(geometry: Geometry) -> list[int]:
    """Tokens that each rank sends to others."""
    return [
        sum(
            piece.stop - piece.start
            for step in make_schedule(geometry, rank)[1:]
            for part in step.send
            for piece in part
        )
        for rank in range(geometry.ring_size)
    ]


def test_only_what_somebody_sees_is_sent() -> None:
    tokens = 16 * 4
    for ring_size in (2, 4, 8):
        whole, block = Geometry(tokens, ring_size), tokens // ring_size
        everything = (ring_size - 1) * tokens
        assert sum(sent(replace(whole, right=-1))) == everything
        assert sum(sent(whole)) == everything / 2
        assert sum(sent(replace(whole, layout="zigzag"))) == everything * 3 / 4
        assert sum(sent(replace(whole, left=3))) == (ring_size - 1) * min(3, block)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_drops_steps(layout: str) -> None:
    """A window that fits into a chunk needs neighbours only, whatever the number of ranks."""
    for rank in range(8):
        steps = make_schedule(Geometry(16 * 8, 8, layout, left=7), rank)
        assert {step.distance for step in steps} <= {0, 1, 7}
        assert all(pair.q_stop - pair.q_start <= 16 for step in steps for pair in step.pairs)


def test_documents_of_other_ranks_do_not_travel() -> None:
    documents, num_rows = pack([4, 4, 4, 4])
    geometry = Geometry(16, 4, "contiguous", documents=documents, num_rows=num_rows)
    assert sent(geometry) == [0, 0, 0, 0]
    assert all(len(make_schedule(geometry, rank)) == 1 for rank in range(4))


def test_shards_of_a_ulysses_group_follow_one_another() -> None:
    documents, num_rows = pack([20, 28], [48])
    geometry = Geometry(48, 3, "zigzag", documents=documents, num_rows=num_rows)
    for segments in held_by(geometry):
        whole = token_index(segments, 2)
        parts = [token_index(part, 2) for part in cut(segments, 16, 4)]
        assert [len(part) for part in parts] == [4, 4, 4, 4]
        assert (np.concatenate(parts) == whole).all()
