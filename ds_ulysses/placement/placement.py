"""`Placement`: who holds which piece of which document in one micro-batch, as one rank sees it.

`shard_batch` makes one for each micro-batch, and every layer is handed that object, forward and backward. What follows
from it (steps of the ring, tables of kernel calls, lengths of documents) is worked out once, when it is first asked
for, whatever the number of layers.

Shapes: B rows, T tokens of a row, P ranks that share it, S = T / P tokens of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from torch._library.opaque_object import MemberType, register_opaque_type
from torch._opaque_base import OpaqueBase

from ds_ulysses.placement.layout import Ints, cut, token_index
from ds_ulysses.placement.mesh import Mesh
from ds_ulysses.placement.schedule import Geometry, held_by

Derived = TypeVar("Derived")


@dataclass(frozen=True, eq=False)
class Placement(OpaqueBase):  # opaque to torch.compile, so that ops can be handed it as it is
    """The place of a micro-batch's tokens. Immutable. Everybody has an equal share: S tokens of each row."""

    mesh: Mesh
    sp_rank: int
    num_tokens: int
    """T, a multiple of the ranks that share it."""
    documents: bytes | None = None
    """What `pack_documents` returns. None: every row is one document from end to end, whatever the number of rows."""
    num_rows: int = 1
    """B; 1 if every row is one document."""
    ulysses_group: str = ""
    ring_group: str = ""
    """Names of this rank's process groups at the two levels."""
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def ulysses_size(self) -> int:
        """The number of ranks of a Ulysses group."""
        return self.mesh.ulysses_size

    @property
    def ring_size(self) -> int:
        """The number of ranks of the ring."""
        return self.mesh.ring_size

    @property
    def head_groups(self) -> int:
        """The number of head groups."""
        return self.mesh.head_groups

    @property
    def ulysses_rank(self) -> int:
        """The rank's place at the Ulysses level."""
        return self.sp_rank % self.mesh.ulysses_size

    @property
    def ring_rank(self) -> int:
        """The rank's place at the ring level."""
        return self.sp_rank // self.mesh.ulysses_size

    @property
    def sp_size(self) -> int:
        """The number of ranks that share a sequence."""
        return self.mesh.ulysses_size * self.mesh.ring_size

    @property
    def packed(self) -> bool:
        """Whether rows hold documents of their own."""
        return self.documents is not None

    @property
    def document_table(self) -> Ints | None:
        """The row, start and stop of each document, [N, 3]; None if every row is one from end to end."""
        if self.documents is None:
            return None
        return np.frombuffer(self.documents, dtype=np.int32).reshape(-1, 3).astype(np.int64)

    def derived(self, key: Hashable, make: Callable[[], Derived]) -> Derived:
        """Return what follows from this placement, by a key that says all else that it depends on; made once."""
        if key not in self._derived:
            self._derived[key] = make()
        found: Derived = self._derived[key]
        return found

    def refuse_others(self, num_rows: int, num_tokens: int) -> None:
        """Raise `ValueError` unless tensors of so many rows, and tokens of a whole row, are those of this placement."""
        if num_tokens != self.num_tokens or (self.packed and num_rows != self.num_rows):
            raise ValueError(
                f"Tensors of {num_rows} rows of {num_tokens} tokens, over all ranks that share them, were given the "
                f"placement of {self.num_rows} rows of {self.num_tokens}: documents would be cut at other places. Pass "
                f"on what `shard_batch` returned as it is, without slicing or padding it."
            )

    def geometry(self, left: int = -1, right: int = 0, num_parts: int = 1) -> Geometry:
        """Return what the schedule under a mask depends on; `num_parts`: shards in which a ring rank's keys leave."""
        mesh = self.mesh
        return Geometry(
            self.num_tokens, mesh.ring_size, mesh.layout, left, right, self.documents, self.num_rows, num_parts
        )

    def token_places(self) -> Ints:
        """Return which tokens of each row this rank holds, and in which order: [num_rows, S]."""
        mesh = self.mesh
        parts = cut(held_by(self.geometry())[self.ring_rank], self.num_tokens // mesh.ring_size, mesh.ulysses_size)
        return token_index(parts[self.ulysses_rank], self.num_rows).T

    def document_lengths(self, num_rows: int) -> Ints:
        """Return the tokens of the document that each token of this rank's shard is in: [num_rows, S]; 0 in padding."""
        if self.document_table is None:
            return np.full((num_rows, self.num_tokens // self.sp_size), self.num_tokens)
        row, start, stop = self.document_table.T
        changes = np.zeros((self.num_rows, self.num_tokens + 1), dtype=np.int64)
        np.add.at(changes, (row, start), stop - start)
        np.add.at(changes, (row, stop), start - stop)
        return np.take_along_axis(changes.cumsum(axis=1), self.token_places(), axis=1)


# What compiled code may read, and is compiled anew for: who shares the sequence. Documents change with every batch.
STATIC = (
    "ulysses_size", "ring_size", "sp_size", "head_groups", "ulysses_rank", "ring_rank", "ulysses_group", "ring_group",
)  # fmt: skip
register_opaque_type(
    Placement,
    typ="reference",
    guard_fn=lambda placement: [getattr(placement, name) for name in STATIC],
    members=dict.fromkeys(STATIC, MemberType.USE_REAL),
)
