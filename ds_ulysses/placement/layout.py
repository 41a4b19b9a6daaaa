"""Where tokens live: pure integers, for any lengths.

R ring ranks hold T / R tokens of each row, in the order of the sequence; the U ranks of a Ulysses group cut those
into U equal shards of S = T / (R * U). Ring ranks are cut in one of two ways:

    contiguous   ring rank g holds the g-th slice of the row
    zigzag       each document is cut into 2R chunks; ring rank g holds chunks g and 2R - 1 - g of it

Under a causal mask, zigzag gives all ring ranks the same work: an early chunk is cheap, its late partner dear. With
R = 3 and one document of 12 tokens: 0 1 10 11 | 2 3 8 9 | 4 5 6 7. A document whose length does not divide gives some
ring ranks one token more, in turns that go on from document to document, so nothing is padded but the row.

Inside a Ulysses group tokens are contiguous, so what its exchange brings together is in order without a copy. The
zigzag is that of Brandon et al., "Striped Attention" (arXiv:2311.09431), section 2, per document as in Megatron.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

NOT_A_DOCUMENT = -1


class Pieces(NamedTuple):
    """Neighbouring tokens of one document, or of a gap between documents: one piece per place in the arrays."""

    row: Ints
    document: Ints
    """Index in the list of documents, or NOT_A_DOCUMENT."""
    start: Ints
    stop: Ints

    def take(self, index: Ints | NDArray[np.bool_] | slice) -> Pieces:
        """Return the pieces at an index."""
        return Pieces(*(column[index] for column in self))

    @property
    def num_tokens(self) -> Ints:
        """The number of tokens of each piece."""
        return self.stop - self.start

    @property
    def at(self) -> Ints:
        """The places where each begins in its row of a buffer that holds these pieces, row by row."""
        ends = np.cumsum(self.num_tokens)
        begins = ends - self.num_tokens
        first_of_row = np.searchsorted(self.row, self.row)
        return begins - begins[first_of_row]


def lay_out(num_tokens: int, num_rows: int, documents: Ints, ring_size: int, layout: str) -> list[Pieces]:
    """Return the pieces that each ring rank holds, by row and place in the row.

    `documents` [N, 3] of (row, start, stop) do not overlap; what they leave uncovered is laid out like one more
    document. Every ring rank holds num_tokens / ring_size tokens of each row; `num_tokens` must be a multiple of
    `ring_size`.
    """
    assert num_tokens % ring_size == 0, (num_tokens, ring_size)
    pieces = _pieces(num_tokens, num_rows, documents)
    if layout == "zigzag":
        ranks, pieces = _zigzag(pieces, ring_size)
    else:
        ranks, pieces = _cut_at_multiples(pieces, pieces.start, num_tokens // ring_size)
    return [_join(pieces.take(ranks == ring_rank)) for ring_rank in range(ring_size)]


def cut(pieces: Pieces, num_tokens: int, num_parts: int) -> list[Pieces]:
    """Cut what a ring rank holds of each row, `num_tokens`, into equal shards: one per rank of its Ulysses group."""
    parts, shards = _cut_at_multiples(pieces, pieces.at, num_tokens // num_parts)
    return [shards.take(parts == part) for part in range(num_parts)]


def token_index(pieces: Pieces, num_rows: int) -> Ints:
    """Return the place in its row of each token of these pieces: [tokens per row, num_rows]."""
    lengths = pieces.num_tokens
    shift = pieces.start - (np.cumsum(lengths) - lengths)
    places = np.arange(lengths.sum()) + np.repeat(shift, lengths)
    return places.reshape(num_rows, -1).T


def _pieces(num_tokens: int, num_rows: int, documents: Ints) -> Pieces:
    """Documents and the gaps between them, by row and place."""
    rows, none = np.arange(num_rows), np.full(num_rows, NOT_A_DOCUMENT)
    zeros, ends = np.zeros(num_rows, dtype=np.int64), np.full(num_rows, num_tokens)
    borders = Pieces(
        np.concatenate([rows, documents[:, 0], rows]),
        np.concatenate([none, np.arange(len(documents)), none]),
        np.concatenate([zeros, documents[:, 1], ends]),
        np.concatenate([zeros, documents[:, 2], ends]),
    )
    borders = borders.take(np.lexsort((borders.stop, borders.start, borders.row)))
    before, after = borders.take(np.s_[:-1]), borders.take(np.s_[1:])
    gaps = Pieces(before.row, np.full(len(before.row), NOT_A_DOCUMENT), before.stop, after.start)
    pieces = Pieces(*(np.concatenate(columns) for columns in zip(borders, gaps, strict=True)))
    pieces = pieces.take(pieces.num_tokens > 0)  # from row to row, the gap is negative
    return pieces.take(np.lexsort((pieces.start, pieces.row)))


def _zigzag(pieces: Pieces, ring_size: int) -> tuple[Ints, Pieces]:
    """Ring rank and piece of each chunk: early ones going up the ring, late ones coming back."""
    ring = np.arange(ring_size)
    share, extra = np.divmod(pieces.num_tokens[:, None], ring_size)
    # All pieces before this one have as many tokens as its start says, so that is whose turn it is.
    sizes = share + ((ring - pieces.start[:, None]) % ring_size < extra)
    chunks = np.concatenate([sizes // 2, (sizes - sizes // 2)[:, ::-1]], axis=1)
    stops = pieces.start[:, None] + np.cumsum(chunks, axis=1)
    row, document = (np.repeat(column, 2 * ring_size) for column in (pieces.row, pieces.document))
    cut_up = Pieces(row, document, (stops - chunks).ravel(), stops.ravel())
    ranks = np.tile(np.concatenate([ring, ring[::-1]]), len(pieces.row))
    filled = cut_up.num_tokens > 0
    return ranks[filled], cut_up.take(filled)


def _cut_at_multiples(pieces: Pieces, at: Ints, size: int) -> tuple[Ints, Pieces]:
    """Cut each piece, which begins at `at`, where a multiple of `size` is; and the number of each slice."""
    first, last = at // size, (at + pieces.num_tokens - 1) // size
    index = np.repeat(np.arange(len(at)), last - first + 1)
    new = np.cumsum(last - first + 1) - (last - first + 1)
    number = np.arange(len(index)) - new[index] + first[index]
    whole, at = pieces.take(index), at[index]
    start = whole.start + np.maximum(number * size - at, 0)
    stop = whole.start + np.minimum(whole.num_tokens, (number + 1) * size - at)
    return number, Pieces(whole.row, whole.document, start, stop)


def _join(pieces: Pieces) -> Pieces:
    """The last ring rank's early and late chunk of a document are neighbours: one piece."""
    before, after = pieces.take(np.s_[:-1]), pieces.take(np.s_[1:])
    new = (before.row != after.row) | (before.document != after.document) | (before.stop != after.start)
    starts = np.concatenate([[True], new]) if len(pieces.row) else new
    stops = np.concatenate([new, [True]]) if len(pieces.row) else new
    return Pieces(pieces.row[starts], pieces.document[starts], pieces.start[starts], pieces.stop[stops])
