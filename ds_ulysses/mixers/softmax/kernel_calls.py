"""From the pairs of a schedule to as few kernel calls as there are masks, and back into the buffers.

In a packed row the pairs of many documents are one call, with a table of segments. Pairs join a call under whose mask
they see what they saw: a document shorter than the window is the same with the window as without.

Shapes: N tokens of a buffer, B batch, H and K query and KV heads of this rank, D dim of queries and keys, E of values.
    q, k, v   [B, N, H or K, D or E], views of buffers
    out       [B, N, H, E]
    lse       [B, H, N]
A block of keys that was put together from several rows has B = 1, and pairs say where in it a row's keys are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ulysses.config import accumulation_dtype
from ds_ulysses.kernels import Kernel, Mask, Segment, Segments, Triple
from ds_ulysses.mixers.softmax.buffers import heads
from ds_ulysses.placement import HeadRun, Pair

SMALL_GAP = 256
"""Tokens: to compute nothing for so many costs less than another kernel call."""
Chain = list[Pair]
"""Pairs of one row and one mask, ascending in queries and in keys."""


class Rows(NamedTuple):
    """The way rows stand in the buffers, and what becomes of what calls find."""

    packed: bool
    """Rows hold documents of their own."""
    joined: bool
    """Keys of all rows stand in one."""
    may_cross: bool
    """What calls find is added up or merged, so that they may reach over the queries of others."""


class KernelCall(NamedTuple):
    """The index of one kernel call in heads views, its mask, and its table if it has several segments."""

    rows: slice
    key_rows: slice
    queries: slice
    keys: slice
    q_heads: slice
    kv_heads: slice
    mask: Mask
    segments: Segments | None

    def of_q(self, x: Tensor) -> Tensor:
        """View its queries in q or out."""
        return x[self.rows, self.queries, self.q_heads]

    def of_kv(self, x: Tensor) -> Tensor:
        """View its keys in k or v."""
        return x[self.key_rows, self.keys, self.kv_heads]

    def of_lse(self, x: Tensor) -> Tensor:
        """View its queries in lse."""
        return x[self.rows, self.q_heads, self.queries]

    def of_qkv(self, x: Triple) -> Triple:
        """View its part of q, k and v."""
        return self.of_q(x[0]), self.of_kv(x[1]), self.of_kv(x[2])

    def forward(self, kernel: Kernel, qkv: Triple) -> tuple[Tensor, Tensor]:
        """Return out and lse of its queries."""
        return kernel.forward(*self.of_qkv(qkv), self.mask, self.segments)

    def add_softmax(self, kernel: Kernel, qkv: Triple, out: Tensor, lse: Tensor) -> None:
        """Add out and lse of its queries to `out` and `lse`, which are 0 and -inf there, as they are for all others."""
        own_out, own_lse = self.forward(kernel, qkv)
        self.of_q(out).add_(own_out)
        own = self.of_lse(lse)
        torch.maximum(own, own_lse, out=own)

    def write_gradients(
        self, kernel: Kernel, dout: Tensor, qkv: Triple, softmax: Sequence[Tensor], grads: Triple
    ) -> None:
        """Write dq, dk and dv into the tensors that they are of; `softmax`: out and lse of the whole softmax."""
        own = self.of_q(softmax[0]), self.of_lse(softmax[1]).contiguous()
        kernel.backward(self.of_q(dout), self.of_qkv(qkv), own, self.mask, self.of_qkv(grads), self.segments)

    def gradients(self, kernel: Kernel, dout: Tensor, qkv: Triple, softmax: Sequence[Tensor]) -> Triple:
        """Return dq, dk and dv, in the dtype of q."""
        own = self.of_q(softmax[0]), self.of_lse(softmax[1]).contiguous()
        return kernel.gradients(self.of_q(dout), self.of_qkv(qkv), own, self.mask, self.segments)


class Span(NamedTuple):
    """The queries and keys of one kernel call, whichever heads it is made for."""

    row: int
    queries: slice
    keys: slice
    left: int
    right: int
    segments: Segments | None


def spans_of(pairs: Iterable[Pair], rows: Rows) -> tuple[Span, ...]:
    """Join pairs into as few spans as there are masks."""
    chains = list(_chains(pairs, rows.may_cross)) if rows.packed else [[pair] for pair in pairs]
    return tuple(map(_span, chains))


def kernel_calls(spans: Iterable[Span], runs: Sequence[HeadRun], mask: Mask, rows: Rows) -> tuple[KernelCall, ...]:
    """Return the calls for these spans and head runs; of `mask` the spans change the limits."""
    return tuple(_call(span, run, mask, rows) for span in spans for run in runs)


def _span(chain: Chain) -> Span:
    first, last = chain[0], chain[-1]
    q_start, k_start = first.q_start, first.k_start
    segments = None
    if len(chain) > 1:
        moved = (
            Segment(p.q_start - q_start, p.q_stop - q_start, p.k_start - k_start, p.k_stop - k_start) for p in chain
        )
        segments = Segments(moved, last.q_stop - q_start, last.k_stop - k_start)
    queries, keys = slice(q_start, last.q_stop), slice(k_start, last.k_stop)
    return Span(first.row, queries, keys, first.left, first.right, segments)


def _call(span: Span, run: HeadRun, mask: Mask, how: Rows) -> KernelCall:
    rows = slice(span.row, span.row + 1) if how.packed else slice(None)
    return KernelCall(
        rows,
        slice(None) if how.joined else rows,
        span.queries,
        span.keys,
        slice(run.q_start, run.q_stop),
        slice(run.kv_start, run.kv_stop),
        replace(mask, left=span.left, right=span.right),
        span.segments,
    )


def _chains(pairs: Iterable[Pair], may_cross: bool) -> Iterator[Chain]:
    """By row and mask, as long as they ascend: what shares queries or keys goes into another chain.

    `may_cross`: whether a chain may go on behind the first pairs of others. A call computes something for all that it
    spans, so a chain does not go on over a gap of more than it covers, unless that is small.
    """
    by_row: dict[int, list[Pair]] = {}
    for pair in pairs:
        by_row.setdefault(pair.row, []).append(pair)
    for row in by_row.values():
        chains: list[Chain] = []
        covered: list[int] = []
        for pair in _with_common_masks(row):
            own = pair.q_stop - pair.q_start
            open_chains = range(0 if may_cross else max(len(chains) - 1, 0), len(chains))
            index = next((i for i in open_chains if _goes_on(chains[i][-1], pair, covered[i] + own)), -1)
            if index < 0:
                chains.append([])
                covered.append(0)
            chains[index].append(pair)
            covered[index] += own
        yield from chains


def _goes_on(last: Pair, pair: Pair, most: int) -> bool:
    same_mask = (last.left, last.right) == (pair.left, pair.right)
    gap = pair.q_start - last.q_stop
    return same_mask and 0 <= gap <= max(most, SMALL_GAP) and pair.k_start >= last.k_stop


def _with_common_masks(pairs: list[Pair]) -> list[Pair]:
    """Give pairs without a limit the widest limit of the others where it does not reach them, by their first query."""
    left, right = max(pair.left for pair in pairs), max(pair.right for pair in pairs)
    found = []
    for pair in sorted(pairs):
        if pair.left < 0 and left >= pair.k_stop - pair.k_start - 1:
            pair = pair._replace(left=left)
        if pair.right < 0 and right >= pair.q_stop - pair.q_start - 1:
            pair = pair._replace(right=right)
        found.append(pair)
    return found


def attend_once(
    q: Tensor, todo: Sequence[tuple[KernelCall, Tensor, Tensor]], kernel: Kernel, value_dim: int
) -> tuple[Tensor, Tensor]:
    """Run kernel calls of which no two share queries: out as a buffer [N, B, H * E], and lse [B, H, N].

    `q` [B, N, H, D] is a view of a buffer; each call comes with the k and v that it indexes. Queries in none get 0.
    """
    batch, tokens, num_heads, _ = q.shape
    if len(todo) == 1 and todo[0][0].of_q(q).shape == q.shape:
        out, lse = todo[0][0].forward(kernel, (q, *todo[0][1:]))
        return out.transpose(0, 1).flatten(2).contiguous(), lse
    buffer = q.new_zeros(tokens, batch, num_heads * value_dim)
    lse = q.new_full((batch, num_heads, tokens), float("-inf"), dtype=accumulation_dtype(q.dtype))
    for call, k, v in todo:
        call.add_softmax(kernel, (q, k, v), heads(buffer, value_dim), lse)
    return buffer, lse
