"""The ledger tells how long a rank stood waiting for others."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import ds_ulysses
from tests.distributed import run_ranks
from tests.parity.attention import Way, topology_of

LATE = 0.5


def waited(way: Way) -> tuple[float, float]:
    """By this rank, where the last one comes late, and in a call with no ledger open."""
    attention = ds_ulysses.DistributedAttention(topology=topology_of(way))
    q, k, v = (torch.ones(1, 4, 4, 8, dtype=torch.double) for _ in range(3))
    attention(q, k, v)
    dist.barrier()
    with ds_ulysses.ledger() as book:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(LATE)
        attention(q, k, v)
    seconds = book.seconds_waited()
    attention(q, k, v)
    return seconds, book.seconds_waited()


@pytest.mark.parametrize("strategy", ["ulysses", "ring", "all_gather"])
def test_who_waits_for_a_late_rank_is_told_how_long(strategy: str) -> None:
    first, last = run_ranks(waited, 2, Way(strategy))
    assert first[0] > 0.9 * LATE
    assert 0 < last[0] < first[0]
    assert (first[1], last[1]) == (first[0], last[0])
