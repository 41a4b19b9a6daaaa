"""One attention layer in fp64 on real ranks, against attention written out in one process, at 1e-10."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ulysses import AttentionShape, DistributedAttention, SequenceParallelConfig, Topology, ledger, predict
from ds_ulysses.kernels import Mask
from ds_ulysses.placement import Placement, pack_documents
from tests import oracle

ATOL = 1e-10


@dataclass(frozen=True)
class Way:
    """A strategy and its options, as the config names them."""

    strategy: str
    ulysses_size: int | str = "auto"
    layout: str = "auto"
    ulysses_head_groups: int = 1


ULYSSES = Way("ulysses")


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
    right: int = 0
    sinks: bool = False
    value_dim: int | None = None
    way: Way = ULYSSES


@cache
def topology_of(way: Way) -> Topology:
    """Of this process, so that each kind of group is made once."""
    return Topology.create(SequenceParallelConfig(sequence_parallel_size=dist.get_world_size(), **asdict(way)))


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout of the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    tokens = case.tokens * dist.get_world_size()
    shapes = [(h, d) for d in (case.head_dim, case.value_dim or case.head_dim) for h in case.heads]
    q, k, dout, v = (torch.randn(case.batch, tokens, *s, generator=generator, dtype=torch.double) for s in shapes)
    return case.logits * q, case.logits * k, v, dout


def placement_of(case: Case) -> Placement:
    documents = None if case.documents is None else pack_documents(case.documents)
    return topology_of(case.way).place(case.tokens * dist.get_world_size(), case.batch, documents)


def shard(x: Tensor, case: Case) -> Tensor:
    """This rank's tokens of [B, T, ...]."""
    places = torch.from_numpy(placement_of(case).token_places()).expand(x.shape[0], -1)
    return x[torch.arange(x.shape[0])[:, None], places]


def reference(case: Case) -> list[Tensor]:
    """This rank's shards of out, dq, dk, dv of one process, and dsinks."""
    q, k, v, dout = tensors(case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    seen = oracle.causal(q.shape[1], case.window) if case.right == 0 else oracle.full(q.shape[1])
    if case.documents is not None:
        seen = oracle.within_documents(seen, case.batch, q.shape[1], list(case.documents))
    sinks = sinks_of(case)
    out = oracle.attention(q, k, v, seen, case.scale, case.softcap, sinks)
    if sinks is not None:
        leaves.append(sinks)
    grads = torch.autograd.grad(out, leaves, dout)
    return [*(shard(x, case) for x in (out, *grads[:3])), *grads[3:]]


def sinks_of(case: Case) -> Tensor | None:
    """A logit for each head, some far above and some far below the scores."""
    return torch.linspace(-9, 9, case.heads[0], dtype=torch.double, requires_grad=True) if case.sinks else None


def mask_of(case: Case) -> Mask:
    left = -1 if case.window is None else case.window - 1
    return Mask(case.scale or case.head_dim**-0.5, left, case.right, case.softcap)


def run(case: Case, attend: Callable[..., Tensor]) -> list[Tensor]:
    """This rank's out, dq, dk, dv through `attend(q, k, v, mask, placement, sinks)`, and dsinks of all ranks."""
    q, k, v, dout = (shard(x, case).clone() for x in tensors(case))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sinks = sinks_of(case)
    out = attend(*leaves, mask_of(case), placement_of(case), *([] if sinks is None else [sinks]))
    out.backward(dout)
    if sinks is not None:
        dist.all_reduce(sinks.grad)
        leaves.append(sinks)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def assert_exact(found: list[Tensor], expected: list[Tensor], case: Any) -> None:
    errors = [(value - right).abs().max().item() for value, right in zip(found, expected, strict=True)]
    assert all(error <= ATOL for error in errors), f"{case}: out and gradients off by {errors}"


def check(*cases: Case) -> None:
    """Exact, and the ledger says what the formula says, to the byte."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for case in cases:
        topology = topology_of(case.way)
        with ledger() as book:
            found = run(case, DistributedAttention(kernel=case.kernel, topology=topology))
        assert_exact(found, reference(case), case)
        documents = None if case.documents is None else pack_documents(case.documents)
        mask, tokens = mask_of(case), case.tokens * world
        shape = AttentionShape(
            *case.heads,
            case.head_dim,
            tokens,
            "fp64",
            case.batch,
            mask.left,
            mask.right,
            documents,
            case.value_dim,
        )
        assert Counter(book.entries) == Counter(predict(shape, topology.mesh, rank)), case
