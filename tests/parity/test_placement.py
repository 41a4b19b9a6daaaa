"""A placement goes with the tensors that it was made for, and with its batch."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from ds_ulysses import DistributedAttention
from ds_ulysses.placement import pack_documents
from tests.distributed import run_ranks
from tests.parity.attention import ULYSSES, Way, topology_of

WAYS = [ULYSSES, Way("ulysses", ulysses_head_groups=2), Way("ring"), Way("all_gather"), Way("hierarchical", 2)]
DOCUMENTS = pack_documents([(0, 0, 5), (0, 5, 16), (1, 0, 16)])


def attend(way: Way, rows: int, tokens: int, documents: bytes | None) -> torch.Tensor:
    """Forward and backward of tensors of so many rows and tokens, on the placement of 2 rows of 16."""
    topology = topology_of(way)
    leaves = [torch.randn(rows, tokens // dist.get_world_size(), h, 8).requires_grad_() for h in (4, 2, 2)]
    out = DistributedAttention(topology=topology)(*leaves, None, topology.place(16, 2, documents))
    torch.autograd.grad(out.sum(), leaves)
    return out


def check_other_tensors(way: Way) -> None:
    attend(way, 2, 16, DOCUMENTS)
    attend(way, 3, 16, None)  # whatever the number of rows, each is one document
    for rows, tokens, documents in ((2, 24, DOCUMENTS), (2, 8, None), (1, 16, DOCUMENTS), (3, 16, DOCUMENTS)):
        with pytest.raises(ValueError, match=rf"Tensors of {rows} rows of {tokens} tokens.*as it is"):
            attend(way, rows, tokens, documents)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_tensors_of_another_shape_are_refused(way: Way) -> None:
    run_ranks(check_other_tensors, 4 if way.strategy == "hierarchical" else 2, way)


def check_lifetime(way: Way) -> None:
    gc.collect()
    gc.disable()
    topology = topology_of(way)
    placement = topology.place(16, 2, DOCUMENTS)
    gone = weakref.ref(placement)
    leaves = [torch.randn(2, 8, h, 8).requires_grad_() for h in (4, 2, 2)]
    torch.autograd.grad(DistributedAttention(topology=topology)(*leaves, None, placement).sum(), leaves)
    del placement
    assert gone() is None


@pytest.mark.parametrize("way", WAYS[:4], ids=str)
def test_nothing_of_it_outlives_the_batch(way: Way) -> None:
    """Tables on a device would fill it, if they waited for the garbage collector."""
    run_ranks(check_lifetime, 2, way)
