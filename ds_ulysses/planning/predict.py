"""`predict`: what the ledger will say of one attention layer, from shapes alone.

Bytes sent by a rank, for u = batch * tokens of a shard * head_dim * itemsize, q_j and k_j heads of rank j of P, and
values of the same dim as keys (others weigh what they are):

    ulysses      in  sum over j != rank of (q_j + 2 k_j) u    out  (P - 1) q_rank u    backward: the same, swapped
    ring         2 K u for each whole shard that somebody needs, which the schedule counts token by token; backward: all
                 but the one that the receiver kept, and the gradient of every one
    all_gather   2 (P - 1) K u; backward: twice, once of them gradients
    hierarchical both; keys that several ranks of a Ulysses group need cross the ring once, then are spread over it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ds_ulysses.config import BYTES, Direction, Entry, on_the_wire
from ds_ulysses.placement import Geometry, HeadSplit, Mesh, make_schedule, num_tokens, stages


@dataclass(frozen=True)
class AttentionShape:
    """One attention layer over whole rows of `num_tokens`, a multiple of sp_size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_tokens: int
    dtype: str
    batch_size: int = 1
    left: int = -1
    """Token i sees token j if -left <= j - i <= right; -1 means no limit."""
    right: int = 0
    documents: bytes | None = None
    """What `pack_documents` returns, or None if every row is one document."""
    value_dim: int | None = None
    """Of values and the output; None: head_dim."""

    @property
    def out_dim(self) -> int:
        """The channels of a head of values and the output."""
        return self.value_dim or self.head_dim

    @property
    def kv_dim(self) -> int:
        """The channels of a KV head, key and value side by side."""
        return self.head_dim + self.out_dim


def predict(shape: AttentionShape, mesh: Mesh, sp_rank: int = 0) -> list[Entry]:
    """Return the ledger's entries of a rank of the sequence-parallel group, forward and backward, in no set order."""
    ring_rank, ulysses_rank = divmod(sp_rank, mesh.ulysses_size)
    if mesh.strategy == "all_gather":
        return list(_all_gather(shape, mesh))
    counter = _Counter(shape, mesh, ulysses_rank)
    return [*counter.exchange(), *(counter.ring(ring_rank) if mesh.ring_size > 1 else ())]


class _Counter:
    """Counts at the two levels of the mesh, for one rank."""

    def __init__(self, shape: AttentionShape, mesh: Mesh, ulysses_rank: int) -> None:
        self.shape, self.mesh, self.rank = shape, mesh, ulysses_rank
        self.split = HeadSplit(shape.num_heads, shape.num_kv_heads, mesh.ulysses_size)
        self.others = [j for j in range(mesh.ulysses_size) if j != ulysses_rank]
        self.spreads_keys = mesh.ring_size > 1 and self.split.shares_kv_heads

    def exchange(self) -> Iterator[Entry]:
        """Yield the exchanges of q, k and v, of out, and of their gradients, in head groups."""
        if not self.others:
            return
        shape, mesh = self.shape, self.mesh
        unit = shape.batch_size * shape.num_tokens // (mesh.ulysses_size * mesh.ring_size) * BYTES[shape.dtype]
        by_rank = [self.split.groups(rank, mesh.head_groups) for rank in range(mesh.ulysses_size)]
        for groups in zip(*by_rank, strict=True):
            q, kv = zip(*(group.counts for group in groups), strict=True)
            kv = (0,) * len(kv) if self.spreads_keys else kv
            qkv = [q[j] * shape.head_dim + kv[j] * shape.kv_dim for j in range(mesh.ulysses_size)]
            out = [q[j] * shape.out_dim for j in range(mesh.ulysses_size)]
            others = len(self.others)
            forward = sum(qkv[j] for j in self.others), others * out[self.rank]
            backward = sum(out[j] for j in self.others), others * qkv[self.rank]
            for channels, direction in zip((*forward, *backward), DIRECTIONS, strict=True):
                yield Entry("all_to_all", "ulysses", shape.dtype, channels * unit, direction)

    def ring(self, ring_rank: int) -> Iterator[Entry]:
        """Yield blocks out and their gradients home, and their spreading over the Ulysses group if there is one."""
        shape, mesh = self.shape, self.mesh
        packed = shape.documents is not None
        rows = shape.batch_size if packed else 1
        parts = mesh.ulysses_size if self.spreads_keys else 1
        geometry = Geometry(
            shape.num_tokens, mesh.ring_size, mesh.layout, shape.left, shape.right, shape.documents, rows, parts
        )
        part = self.rank if self.spreads_keys else 0
        batch = 1 if packed else shape.batch_size
        num_kv = shape.num_kv_heads if self.spreads_keys else self.split.counts(self.rank)[1]
        wire = on_the_wire(mesh.grad_dtype, shape.dtype)
        for step in make_schedule(geometry, ring_rank):
            if step.distance:
                out, home = num_tokens(step.send[part]), step.receive[part]
                unit = batch * num_kv * shape.kv_dim
                yield from _sent(out * unit, shape.dtype, "forward")
                yield from _sent(0 if step.parked_there else out * unit, shape.dtype, "backward")
                yield from _sent(home * unit, wire, "backward")
            if self.spreads_keys:
                yield from self._spread(step.receive, batch, wire)

    def _spread(self, tokens: tuple[int, ...], batch: int, wire: str) -> Iterator[Entry]:
        unit = batch * self.shape.kv_dim
        spread = tokens[self.rank] * sum(self.split.counts(j)[1] for j in self.others) * unit
        collected = sum(tokens[j] for j in self.others) * self.split.counts(self.rank)[1] * unit
        for direction in ("forward", "backward"):
            yield Entry("all_to_all", "ulysses", self.shape.dtype, spread * BYTES[self.shape.dtype], direction)
        yield Entry("all_to_all", "ulysses", wire, collected * BYTES[wire], "backward")


DIRECTIONS: tuple[Direction, ...] = ("forward", "forward", "backward", "backward")


def _all_gather(shape: AttentionShape, mesh: Mesh) -> Iterator[Entry]:
    others = mesh.ring_size - 1
    unit = shape.batch_size * shape.num_tokens // mesh.ring_size * shape.kv_dim
    wire = on_the_wire(mesh.grad_dtype, shape.dtype)
    for start, stop in stages(shape.num_kv_heads):
        elements = others * (stop - start) * unit
        for direction in ("forward", "backward"):
            yield Entry("all_gather", "ring", shape.dtype, elements * BYTES[shape.dtype], direction)
        yield Entry("reduce_scatter", "ring", wire, elements * BYTES[wire], "backward")


def _sent(elements: int, dtype: str, direction: Direction) -> Iterator[Entry]:
    """A message, unless it is empty."""
    if elements:
        yield Entry("send", "ring", dtype, elements * BYTES[dtype], direction)
