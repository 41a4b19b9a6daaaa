"""Transfers overlap with work: the next is on its way before the current is waited for, and no more than that."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from ds_ulysses.comm.collectives import Pending, one_ahead


class Block:
    """Something that can be watched."""


class Work:
    def __init__(self, events: list[str], number: int) -> None:
        self.events, self.number = events, number

    def wait(self) -> None:
        self.events.append(f"wait {self.number}")


def test_the_next_is_started_before_the_current_is_waited_for() -> None:
    events: list[str] = []

    def started() -> Iterator[Pending[int]]:
        for number in range(3):
            events.append(f"start {number}")
            yield Pending(number, [Work(events, number)])

    for number in one_ahead(started()):
        events.append(f"use {number}")
    assert events == [
        "start 0", "start 1", "wait 0", "use 0", "start 2", "wait 1", "use 1", "wait 2", "use 2",
    ]  # fmt: skip


def test_two_blocks_are_in_memory_whatever_their_number() -> None:
    alive: list[weakref.ref[Block]] = []
    most = 0

    def started() -> Iterator[Pending[Block]]:
        nonlocal most
        for _ in range(6):
            block = Block()
            alive.append(weakref.ref(block))
            most = max(most, sum(ref() is not None for ref in alive))
            pending = Pending(block)
            del block
            yield pending
            del pending

    arriving = one_ahead(started())
    for _ in range(6):
        block = next(arriving)
        del block
    assert most == 2


def test_views_of_what_arrives_wait_for_it() -> None:
    events: list[str] = []
    assert Pending(2, [Work(events, 0)]).then(lambda x: x + 1).wait() == 3
    assert events == ["wait 0"]


def test_nothing_to_wait_for() -> None:
    assert list(one_ahead(iter(()))) == []
