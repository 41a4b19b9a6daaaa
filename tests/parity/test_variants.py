"""However attention is called, every strategy gives the same: recomputed, compiled, twice, in part, in bf16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_ulysses import DistributedAttention, ledger
from tests import oracle
from tests.distributed import run_ranks
from tests.parity.attention import (
    ULYSSES,
    Case,
    Way,
    assert_exact,
    mask_of,
    placement_of,
    reference,
    run,
    shard,
    tensors,
    topology_of,
)

WAYS = {
    "ulysses": ULYSSES,
    "head groups": Way("ulysses", ulysses_head_groups=2),
    "ring": Way("ring"),
    "all_gather": Way("all_gather"),
    "2x2": Way("hierarchical", 2),
}


def world_of(way: Way) -> int:
    return 4 if way.strategy == "hierarchical" else 2


def check_variants(way: Way) -> None:
    """Recompute, compile, a second backward, no_grad and partial gradients change nothing."""
    tokens = 6 * dist.get_world_size()
    case = Case((6, 3), 2, documents=((0, 0, 7), (0, 7, tokens), (1, 1, tokens)), way=way)
    expected = reference(case)
    attention = DistributedAttention(topology=topology_of(way))

    def compiled(*args: Any) -> Tensor:
        torch._dynamo.reset()
        return torch.compile(attention, backend="aot_eager", fullgraph=True)(*args)

    variants: dict[str, Callable[..., Tensor]] = {
        "plain": attention,
        "reentrant": lambda *a: checkpoint(attention, *a, use_reentrant=True),
        "non-reentrant": lambda *a: checkpoint(attention, *a, use_reentrant=False),
        "compiled": compiled,
        "compiled inside a checkpoint": lambda *a: checkpoint(compiled, *a, use_reentrant=False),
        "strided inputs": lambda q, k, v, *a: attention(*(x.mT.contiguous().mT for x in (q, k, v)), *a),
    }
    counts = {}
    for name, attend in variants.items():
        with ledger() as book:
            assert_exact(run(case, attend), expected, name)
        counts[name] = book.count(direction="forward"), book.count(direction="backward")
    forwards, backwards = counts["plain"]
    twice = {"reentrant", "non-reentrant", "compiled inside a checkpoint"}
    for name, count in counts.items():
        # A non-reentrant checkpoint stops recomputing before the last exchange of Ulysses, whose result nobody saved.
        skipped = int(
            name == "non-reentrant" and way.strategy in ("ulysses", "hierarchical") and way != WAYS["head groups"]
        )
        assert count == (forwards * (2 if name in twice else 1) - skipped, backwards), name

    q, k, v, dout = (shard(x, case).clone() for x in tensors(case))
    out = attention(q.requires_grad_(), k, v.requires_grad_(), mask_of(case), placement_of(case))
    for _ in range(2):
        dq, dv = torch.autograd.grad(out, [q, v], dout, retain_graph=True)
        assert_exact([out, dq, dv], [expected[0], expected[1], expected[3]], "some inputs")
    with torch.no_grad():
        assert_exact([attention(q, k, v, mask_of(case), placement_of(case))], expected[:1], "no_grad")


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_variants(way: Way) -> None:
    run_ranks(check_variants, world_of(way), way)


def check_runs_are_bitwise_equal(way: Way) -> None:
    case = Case((6, 3), 2, documents=((0, 0, 7), (1, 1, 12)), way=way)
    first, second = (run(case, DistributedAttention(topology=topology_of(way))) for _ in range(2))
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_runs_are_bitwise_equal(way: Way) -> None:
    run_ranks(check_runs_are_bitwise_equal, world_of(way), way)


def bf16_errors(case: Case) -> list[float]:
    """Relative L2 errors of out, dq, dk, dv of the whole sequence in bf16, against fp64 on the same bf16 numbers."""
    whole = [x.bfloat16() for x in tensors(case)]
    q, k, v = (x.double().requires_grad_() for x in whole[:3])
    out = oracle.attention(q, k, v, oracle.causal(whole[0].shape[1]))
    right = [shard(x, case) for x in (out, *torch.autograd.grad(out, (q, k, v), whole[3].double()))]
    leaves = [shard(x, case).requires_grad_() for x in whole[:3]]
    found = DistributedAttention(topology=topology_of(case.way))(*leaves)
    grads = torch.autograd.grad(found, leaves, shard(whole[3], case))
    sums = torch.tensor(
        [[(x - y).square().sum(), y.square().sum()] for x, y in zip((found, *grads), right, strict=True)]
    )
    dist.all_reduce(sums)
    return (sums[:, 0] / sums[:, 1]).sqrt().tolist()


BF16 = Case((4, 2), 1, head_dim=32, logits=1.0)


def kernel_errors(tokens: int) -> list[float]:
    """The same of the kernel alone, in one process."""
    return bf16_errors(replace(BF16, tokens=tokens))


@pytest.mark.parametrize("way", [Way("ring"), Way("all_gather"), Way("hierarchical", 2), WAYS["head groups"]], ids=str)
def test_bf16_errors_are_those_of_the_kernel_for_any_number_of_ranks(way: Way) -> None:
    tokens = 512
    alone = run_ranks(kernel_errors, 1, tokens)[0]
    worlds = [4, 8] if way.strategy == "hierarchical" else [2, 4, 8]
    errors = [run_ranks(bf16_errors, world, replace(BF16, tokens=tokens // world, way=way))[0] for world in worlds]
    for found in errors:
        assert all(error <= 2 * kernel for error, kernel in zip(found, alone, strict=True)), (found, alone)
    assert all(last <= 1.25 * first for first, last in zip(errors[0], errors[-1], strict=True)), errors


def check_grad_dtype(way: Way) -> tuple[set[str], float]:
    """Gradients of keys in bf16 on the ring: half the bytes, and an error of bf16 in dk and dv alone."""
    import ds_ulysses

    case = Case((6, 3), 1, way=way)
    config = ds_ulysses.SequenceParallelConfig(
        sequence_parallel_size=dist.get_world_size(), strategy=way.strategy, grad_dtype="bf16"
    )
    topology = ds_ulysses.Topology.create(config)
    attention = DistributedAttention(topology=topology)
    with ledger() as book:
        found = run(
            case, lambda q, k, v, mask, placement: attention(q, k, v, mask, topology.place(placement.num_tokens))
        )
    expected = reference(case)
    assert_exact(found[:2], expected[:2], case)
    errors = [(x - y).norm() / y.norm() for x, y in zip(found[2:], expected[2:], strict=True)]
    assert all(error < 1e-2 for error in errors)
    wire = {entry.dtype for entry in book.entries if entry.direction == "backward"}
    return wire, float(min(errors))


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_gradients_travel_in_the_dtype_of_the_config(strategy: str) -> None:
    ranks = run_ranks(check_grad_dtype, 4, Way(strategy))
    assert all("bf16" in wire for wire, _ in ranks)
    assert max(error for _, error in ranks) > 1e-5
