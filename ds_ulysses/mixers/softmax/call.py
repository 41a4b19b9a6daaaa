"""What one attention call is, besides its tensors: heads, mask, kernel, and who takes part.

An op that torch.compile does not look into takes tensors, numbers and strings; a `Call` travels through it as a string.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, get_type_hints

from torch import Tensor

from ds_ulysses.kernels import KERNELS, Kernel
from ds_ulysses.placement import Geometry, HeadRun, HeadSplit, split_heads


class Place(NamedTuple):
    """A rank's place at the two levels of its sequence-parallel group. A level of one rank has no group."""

    ulysses_group: str
    ulysses_size: int
    ulysses_rank: int
    ring_group: str
    ring_size: int
    ring_rank: int
    layout: str
    head_groups: int
    grad_dtype: str


class Call(NamedTuple):
    """One call of attention. Head counts are those of the model; `split` says which of them are here."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of queries and keys."""
    value_dim: int
    """Of values and the output."""
    scale: float
    left: int
    right: int
    softcap: float
    kernel_name: str
    place: Place

    def encode(self) -> str:
        return ";".join([str(x) for x in (*self[:-1], *self.place)])

    @property
    def kernel(self) -> Kernel:
        return KERNELS[self.kernel_name]

    @property
    def split(self) -> HeadSplit:
        return split_heads(self.num_heads, self.num_kv_heads, self.place.ulysses_size)

    @property
    def dims(self) -> tuple[int, int]:
        return self.head_dim, self.value_dim

    @property
    def kv_dim(self) -> int:
        """Channels of a KV head, key and value side by side."""
        return self.head_dim + self.value_dim

    @property
    def local_heads(self) -> tuple[int, int]:
        """Query and KV heads of this rank."""
        return self.split.counts(self.place.ulysses_rank)

    @property
    def runs(self) -> list[HeadRun]:
        """Those heads, by how they are grouped."""
        return self.split.runs(self.place.ulysses_rank)

    @property
    def spreads_keys(self) -> bool:
        """Whether several ranks of the Ulysses group need the same KV head and there is a ring.

        Keys then cross the ring as sequence shards, once, and are spread over the group on arrival.
        """
        return self.place.ring_size > 1 and self.split.shares_kv_heads

    def geometry(self, buffer: Tensor, documents: Tensor | None) -> Geometry:
        """`buffer` [n, B, ...] holds a ring rank's tokens of each row."""
        num_tokens, batch = buffer.shape[:2]
        return Geometry(
            num_tokens * self.place.ring_size,
            self.place.ring_size,
            self.place.layout,
            self.left,
            self.right,
            documents.int().numpy().tobytes() if documents is not None else None,
            1 if documents is None else batch,
            self.place.ulysses_size if self.spreads_keys else 1,
        )


@lru_cache(maxsize=256)
def decode(text: str) -> Call:
    """Undo `Call.encode`."""
    own, place = (list(get_type_hints(fields).values()) for fields in (Call, Place))
    own.remove(Place)
    values = [kind(value) for kind, value in zip(own + place, text.split(";"), strict=True)]
    return Call._make([*values[: len(own)], Place._make(values[len(own) :])])
