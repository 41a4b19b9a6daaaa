"""The ledger: every byte that this rank sends, as it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Entry:
    """One collective. `bytes_sent` leaves out what a rank keeps; for an all-reduce it is the payload."""

    op: str
    level: str
    dtype: torch.dtype
    bytes_sent: int
    direction: Direction


@dataclass
class Ledger:
    """The collectives of one `ledger()` block, in the order of their start."""

    entries: list[Entry] = field(default_factory=list)

    def count(self, op: str | None = None, direction: Direction | None = None) -> int:
        """Number of collectives, of one kind if asked."""
        return len(self._select(op, direction))

    def bytes_sent(self, op: str | None = None, direction: Direction | None = None) -> int:
        """Bytes that this rank sent, of one kind if asked."""
        return sum(entry.bytes_sent for entry in self._select(op, direction))

    def _select(self, op: str | None, direction: Direction | None) -> list[Entry]:
        return [e for e in self.entries if op in (None, e.op) and direction in (None, e.direction)]


# Backward passes run on threads of autograd's own, so a context variable would miss what they send.
_open_ledgers: list[Ledger] = []


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Record each collective of this process while the block is open. Blocks may nest."""
    book = Ledger()
    _open_ledgers.append(book)
    try:
        yield book
    finally:
        # By identity: two ledgers that saw the same collectives compare equal.
        _open_ledgers[:] = [open_ledger for open_ledger in _open_ledgers if open_ledger is not book]


def record(entry: Entry) -> None:
    """Write an entry into every open ledger. Called where bytes leave, nowhere else."""
    for book in _open_ledgers:
        book.entries.append(entry)
