"""`DistributedAttention` in fp64 against attention written out in one process, at 1e-10."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_ulysses import DistributedAttention, ledger
from ds_ulysses.attention.ulysses import predict
from ds_ulysses.heads import HeadSplit
from ds_ulysses.kernels import Mask
from tests import oracle
from tests.distributed import run_ranks

ATOL = 1e-10


@dataclass(frozen=True)
class Case:
    heads: tuple[int, int]
    batch: int = 1
    tokens: int = 6
    head_dim: int = 8
    window: int | None = None
    softcap: float = 0.0
    documents: tuple[tuple[int, int, int], ...] | None = None
    scale: float | None = None
    logits: float = 2.0
    kernel: str = "auto"


def tensors(case: Case) -> list[Tensor]:
    """q, k, v and dout of the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    tokens = case.tokens * dist.get_world_size()
    heads = (case.heads[0], case.heads[1], case.heads[1], case.heads[0])
    q, k, v, dout = (
        torch.randn(case.batch, tokens, h, case.head_dim, generator=generator, dtype=torch.double) for h in heads
    )
    return [case.logits * q, case.logits * k, v, dout]


def shard(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


def reference(case: Case) -> list[Tensor]:
    """This rank's shards of out, dq, dk, dv of one process."""
    q, k, v, dout = tensors(case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    seen = oracle.causal(q.shape[1], case.window)
    if case.documents is not None:
        seen = oracle.within_documents(seen, case.batch, q.shape[1], list(case.documents))
    out = oracle.attention(*leaves, seen, case.scale, case.softcap)
    return [shard(x) for x in (out, *torch.autograd.grad(out, leaves, dout))]


def mask_of(case: Case) -> Mask:
    left = -1 if case.window is None else case.window - 1
    return Mask(case.scale or case.head_dim**-0.5, left, 0, case.softcap)


def run(case: Case, attend: Callable[..., Tensor]) -> list[Tensor]:
    """This rank's out, dq, dk, dv through `attend(q, k, v, mask, documents)`."""
    q, k, v, dout = (shard(x).clone() for x in tensors(case))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    documents = None if case.documents is None else torch.tensor(case.documents, dtype=torch.int).reshape(-1, 3)
    out = attend(*leaves, mask_of(case), documents)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def assert_exact(found: list[Tensor], expected: list[Tensor], case: Any) -> None:
    errors = [(value - right).abs().max().item() for value, right in zip(found, expected, strict=True)]
    assert max(errors) <= ATOL, f"{case}: out and gradients off by {errors}"


def check(*cases: Case) -> None:
    """Exact, and the ledger says what the formula says, to the byte."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for case in cases:
        with ledger() as book:
            found = run(case, DistributedAttention(kernel=case.kernel))
        assert_exact(found, reference(case), case)
        predicted = predict(HeadSplit(*case.heads, world), rank, case.batch, case.tokens, case.head_dim, torch.double)
        assert book.entries == predicted


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


def check_variants() -> None:
    """Recompute, compile, a second backward, no_grad and partial gradients change nothing."""
    case = Case((6, 3), 2, documents=((0, 0, 7), (0, 7, 12), (1, 1, 12)))
    expected = reference(case)
    attention = DistributedAttention()

    def compiled(*args: Any) -> Tensor:
        torch._dynamo.reset()
        return torch.compile(attention, backend="aot_eager", fullgraph=True)(*args)

    variants: dict[str, Callable[..., Tensor]] = {
        "reentrant": lambda *a: checkpoint(attention, *a, use_reentrant=True),
        "non-reentrant": lambda *a: checkpoint(attention, *a, use_reentrant=False),
        "compiled": compiled,
        "compiled inside a checkpoint": lambda *a: checkpoint(compiled, *a, use_reentrant=False),
        "strided inputs": lambda q, k, v, *a: attention(*(x.mT.contiguous().mT for x in (q, k, v)), *a),
    }
    for name, attend in variants.items():
        with ledger() as book:
            assert_exact(run(case, attend), expected, name)
        # A non-reentrant checkpoint stops recomputing before the last exchange, whose result nobody saved.
        forwards = {"reentrant": 4, "non-reentrant": 3, "compiled inside a checkpoint": 4}.get(name, 2)
        assert (book.count(direction="forward"), book.count(direction="backward")) == (forwards, 2), name

    q, k, v, dout = (shard(x).clone() for x in tensors(case))
    documents = torch.tensor(case.documents, dtype=torch.int)
    out = attention(q.requires_grad_(), k, v.requires_grad_(), mask_of(case), documents)
    for _ in range(2):
        dq, dv = torch.autograd.grad(out, [q, v], dout, retain_graph=True)
        assert_exact([out, dq, dv], [expected[0], expected[1], expected[3]], "some inputs")
    with torch.no_grad():
        assert_exact([attention(q, k, v, mask_of(case), documents)], expected[:1], "no_grad")


def test_variants() -> None:
    run_ranks(check_variants, 2)


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
    for bad in ((x[0], x, x), (x, x[:, :2], x[:, :2]), (x, x, x[..., :4]), (x, x[:, :, :2], x)):
        with pytest.raises(ValueError, match="expected .batch, tokens, heads, head_dim."):
            DistributedAttention()(*bad)
    with pytest.raises(ValueError, match="4 query heads over 3 KV heads"):
        DistributedAttention()(x, x[:, :, :3], x[:, :, :3])


def test_refusals() -> None:
    run_ranks(check_refusals, 1)
