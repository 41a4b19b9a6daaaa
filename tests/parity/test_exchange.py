"""The two exchanges put every number where the formula says, and are each other's transpose."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ds_ulysses
from ds_ulysses.placement.heads import HeadSplit
from tests.distributed import run_ranks

WORLDS = [1, 2, 3, 4]


def everyone() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def check_heads(batch: int, tokens: int, heads: int, head_dim: int) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.arange(batch * tokens * world * heads * head_dim, dtype=torch.double)
    whole = whole.view(batch, tokens * world, heads, head_dim)  # a unique number per (b, s, h, d)
    x = whole[:, rank * tokens : (rank + 1) * tokens].clone().requires_grad_()
    start, stop = HeadSplit(heads, heads, world).q_range(rank)

    gathered = ds_ulysses.gather_seq_scatter_heads(x, everyone())
    assert torch.equal(gathered, whole[:, :, start:stop])
    back = ds_ulysses.gather_heads_scatter_seq(gathered, everyone(), num_heads=heads)
    assert torch.equal(back, x)

    generator = torch.Generator().manual_seed(1)
    dwhole = torch.randn(whole.shape, generator=generator, dtype=torch.double)
    (dx,) = torch.autograd.grad(gathered, x, dwhole[:, :, start:stop], retain_graph=True)
    assert torch.equal(dx, dwhole[:, rank * tokens : (rank + 1) * tokens])
    (dx,) = torch.autograd.grad(back, x, dwhole[:, rank * tokens : (rank + 1) * tokens])
    assert torch.equal(dx, dwhole[:, rank * tokens : (rank + 1) * tokens])


def check_hidden(tokens: int, hidden: int) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.arange(tokens * world * hidden, dtype=torch.float).view(tokens * world, hidden)
    x = whole[rank * tokens : (rank + 1) * tokens]
    start, stop = HeadSplit(hidden, hidden, world).q_range(rank)
    gathered = ds_ulysses.gather_seq_scatter_heads(x, everyone())
    assert torch.equal(gathered, whole[:, start:stop])
    assert torch.equal(ds_ulysses.gather_heads_scatter_seq(gathered, everyone(), hidden), x)


def check_refusals() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    with pytest.raises(ValueError, match="Give num_heads"):
        ds_ulysses.gather_heads_scatter_seq(torch.zeros(1, 4, 3, 2), everyone(), num_heads=8)
    with pytest.raises(ValueError, match=f"on rank {rank} of {world}.*pad the sequence"):
        ds_ulysses.gather_heads_scatter_seq(torch.zeros(1, 5, 3, 2), everyone())


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("shape", [(3, 8, 4, 2), (1, 2, 7, 3), (2, 3, 1, 4)], ids=str)
def test_heads(shape: tuple[int, int, int, int], world: int) -> None:
    run_ranks(check_heads, world, *shape)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("hidden", [8, 5])
def test_tokens_and_hidden(hidden: int, world: int) -> None:
    run_ranks(check_hidden, world, 4, hidden)


def test_shapes_that_do_not_fit_are_refused() -> None:
    run_ranks(check_refusals, 2)
