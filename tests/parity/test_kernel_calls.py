"""How often the kernel is called: by steps and masks, never by documents."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ds_ulysses import DistributedAttention
from ds_ulysses.kernels import KERNELS, Mask
from ds_ulysses.placement import pack_documents
from tests.distributed import run_ranks
from tests.parity.attention import ULYSSES, Way, topology_of

TOKENS = 1200
Calls = tuple[int, int]
"""Forward and backward, of one layer on one rank."""


def documents_of(count: int, rows: int) -> bytes:
    """As many in each row, of lengths that differ, with a gap of padding at the end."""
    cuts = [(TOKENS - 7) * i * (i + 40) // (count * (count + 40)) for i in range(count + 1)]
    return pack_documents((row, cuts[i], cuts[i + 1]) for row in range(rows) for i in range(count))


def count_calls(way: Way, count: int, rows: int, window: int | None, heads: tuple[int, int]) -> Calls:
    kernel, topology = KERNELS["cpu_flash"], topology_of(way)
    forward, gradients, backward, calls = kernel.forward, kernel.gradients, kernel.backward, [0, 0]

    def counted(index: int, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            calls[index] += 1
            return function(*arguments)

        return call

    tokens = TOKENS // dist.get_world_size()
    leaves = [torch.randn(rows, tokens, h, 8).requires_grad_() for h in (heads[0], heads[1], heads[1])]
    mask = Mask(0.3, -1 if window is None else window - 1)
    with (
        patch.object(kernel, "forward", counted(0, forward)),
        patch.object(kernel, "gradients", counted(1, gradients)),
        patch.object(kernel, "backward", counted(1, backward)),
    ):
        out = DistributedAttention(topology=topology)(
            *leaves, mask, topology.place(TOKENS, rows, documents_of(count, rows))
        )
        torch.autograd.grad(out.sum(), leaves)
    return calls[0], calls[1]


@pytest.mark.parametrize("count", [3, 60, 300])
@pytest.mark.parametrize(
    ("way", "world", "most"),
    [
        (ULYSSES, 1, 1),
        (ULYSSES, 2, 1),
        (Way("ring"), 2, 2),  # own keys causal; of the other rank, those that are seen in full
        (Way("ring"), 4, 4),
        (Way("hierarchical", 2), 4, 2),
        (Way("all_gather"), 2, 2 * 2),  # early and late chunks, in two stages of KV heads
    ],
    ids=str,
)
def test_a_packed_row_is_one_call_per_step(way: Way, world: int, most: int, count: int) -> None:
    for forward, backward in run_ranks(count_calls, world, way, count, 1, None, (4, 2)):
        assert forward == backward
        assert 1 <= forward <= most


def test_what_else_makes_calls() -> None:
    """Rows that differ, heads that are not evenly grouped, head groups; and windows on a ring, by their offsets."""
    assert run_ranks(count_calls, 1, ULYSSES, 60, 3, None, (4, 2)) == [(3, 3)]
    assert run_ranks(count_calls, 2, ULYSSES, 60, 1, 20, (4, 2)) == [(1, 1)] * 2
    assert run_ranks(count_calls, 2, ULYSSES, 60, 1, None, (9, 3)) == [(2, 2)] * 2
    assert run_ranks(count_calls, 2, Way("ulysses", ulysses_head_groups=2), 60, 1, None, (4, 2)) == [(2, 2)] * 2
    contiguous = run_ranks(count_calls, 4, Way("ring", layout="contiguous"), 300, 1, None, (4, 2))
    assert all(forward <= 2 for forward, _ in contiguous)  # only one document crosses the edge of a shard
