"""`DistributedAttention` with Ulysses: any head count, mask and way of being called; and its interface."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_ulysses import DistributedAttention
from tests import oracle
from tests.distributed import run_ranks
from tests.parity.attention import Case, Way, assert_exact, check, reference, run, topology_of

HEADS = [
    (4, 4),
    (4, 2),
    (4, 1),
    (9, 3),
    (28, 4),
    (14, 2),
    (40, 8),
    (32, 8),
    (8, 1),
    (3, 3),
    (12, 4),
    (7, 7),
    (1, 1),
]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 8])
def test_any_head_count(world: int) -> None:
    run_ranks(check, world, *(Case(heads, batch, 2, 4) for heads in HEADS for batch in (1, 2)))


def test_more_ranks_than_a_kv_group_has_heads() -> None:
    run_ranks(check, 16, Case((40, 8), 1, 1, 4))


@pytest.mark.parametrize("kernel", ["cpu_flash", "eager"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_masks(world: int, kernel: str) -> None:
    tokens = 6 * world
    cut = ((0, 0, tokens // 2 + 1), (0, tokens // 2 + 1, tokens), (1, 2, tokens - 1))
    singles = tuple((row, i, i + 1) for row in range(2) for i in range(tokens))
    cases = [Case((4, 2), 2, window=w, kernel=kernel) for w in (1, 2, 5, 6, 7, tokens, tokens + 5)]
    cases += [Case((6, 3), 2, documents=d, window=w, kernel=kernel) for d in (cut, singles, ()) for w in (None, 3)]
    cases += [Case((3, 1), 1, scale=0.9, kernel=kernel), Case((4, 2), 1, logits=30.0, kernel=kernel)]
    run_ranks(check, world, *cases)


def test_softcap() -> None:
    run_ranks(check, 2, Case((6, 3), 2, softcap=1.5), Case((6, 3), 2, softcap=1.5, window=3))


def cases() -> st.SearchStrategy[Case]:
    def build(group: int, kv: int, batch: int, tokens: int, window: int | None, cuts: list[int] | None) -> Case:
        # Borders in sixtieths of the sequence of 2 ranks, so that they fall anywhere, also inside a shard.
        documents = None
        if cuts is not None:
            borders = sorted({0, *(c * 2 * tokens // 60 for c in cuts), 2 * tokens})
            documents = tuple((row, a, b) for row in range(batch) for a, b in pairwise(borders))
        return Case((group * kv, kv), batch, tokens, 4, window, documents=documents)

    return st.builds(
        build, st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 7),
        st.none() | st.integers(1, 9), st.none() | st.lists(st.integers(1, 59), max_size=3),
    )  # fmt: skip


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(cases(), min_size=15, max_size=15))
def test_random_cases(examples: list[Case]) -> None:
    run_ranks(check, 2, *examples)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """A local attention of the user's own, on the whole sequence."""
    return oracle.attention(q, k, v, oracle.causal(q.shape[1], window))


def check_own_local_attention() -> None:
    for heads in [(4, 2), (9, 3), (12, 4), (2, 1)]:
        case = Case(heads, 2, window=5)
        attention = DistributedAttention(
            local_attention=plain_attention,
            sequence_process_group=dist.group.WORLD,
            scatter_idx=2,
            gather_idx=1,
        )
        found = run(case, lambda q, k, v, mask, documents, attention=attention: attention(q, k, v, window=5))
        assert_exact(found, reference(case), case)


@pytest.mark.parametrize("world", [1, 2, 4, 5])
def test_own_local_attention(world: int) -> None:
    run_ranks(check_own_local_attention, world)


def check_refusals() -> None:
    x = torch.zeros(1, 4, 4, 8)
    with pytest.raises(ValueError, match="scatter_idx=1, gather_idx=2"):
        DistributedAttention(scatter_idx=1, gather_idx=2)
    for bad in ((x[0], x, x), (x, x[:, :2], x[:, :2]), (x, x[..., :4], x), (x, x, x[:, :, :2]), (x, x[:, :, :2], x)):
        with pytest.raises(ValueError, match="expected .batch, tokens, heads, head_dim."):
            DistributedAttention()(*bad)
    with pytest.raises(ValueError, match="4 query heads over 3 KV heads"):
        DistributedAttention()(x, x[:, :, :3], x[:, :, :3])
    with pytest.raises(ValueError, match="sequence_process_group would be ignored"):
        DistributedAttention(None, dist.group.WORLD, topology=topology_of(Way("ring")))
    with pytest.raises(ValueError, match="'ring' in 1 head groups never brings together"):
        DistributedAttention(plain_attention, topology=topology_of(Way("ring")))
    with pytest.raises(ValueError, match="'ulysses' in 2 head groups never brings together"):
        DistributedAttention(plain_attention, topology=topology_of(Way("ulysses", ulysses_head_groups=2)))


def test_refusals() -> None:
    run_ranks(check_refusals, 1)
