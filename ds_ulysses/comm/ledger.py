"""The ledger: every byte that this rank sends, as it is sent, and how long it stands waiting for what it is sent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ds_ulysses.config import Direction, Entry

Wait = float | tuple[torch.cuda.Event, torch.cuda.Event]
"""Seconds of the host, or what stands around them in a GPU's stream."""


@dataclass
class Ledger:
    """The collectives of one `ledger()` block, in the order of their start."""

    entries: list[Entry] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)

    def count(self, op: str | None = None, direction: Direction | None = None) -> int:
        """Count the collectives, of one kind if asked."""
        return len(self._select(op, direction))

    def bytes_sent(self, op: str | None = None, direction: Direction | None = None) -> int:
        """Count the bytes that this rank sent, of one kind if asked."""
        return sum(entry.bytes_sent for entry in self._select(op, direction))

    def seconds_waited(self) -> float:
        """Return how long this rank's computation stood still for exchanges: what did not travel while it was busy.

        Others that come late are waited for too. On a GPU this is the time of its stream; the host waits here for it.
        """
        return sum(map(_seconds, self.waits))

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


@contextmanager
def waiting(sent: torch.Tensor | None) -> Iterator[None]:
    """Time the block, in which what comes next on the device of `sent` is made to wait, for every open ledger."""
    if sent is None or not _open_ledgers:
        yield
        return
    wait: Wait
    if sent.is_cuda:  # marks in the stream, so that nothing waits for the clock
        wait = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        wait[0].record()
        yield
        wait[1].record()
    else:
        begun = time.perf_counter()
        yield
        wait = time.perf_counter() - begun
    for book in _open_ledgers:
        book.waits.append(wait)


def _seconds(wait: Wait) -> float:
    if isinstance(wait, float):
        return wait
    begun, ended = wait
    ended.synchronize()
    return begun.elapsed_time(ended) / 1000


def record(entry: Entry) -> None:
    """Write an entry into every open ledger. Called where bytes leave, nowhere else."""
    for book in _open_ledgers:
        book.entries.append(entry)
