"""Positions and documents: what a token sees does not depend on where the sequence is cut."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import oracle
from tests.distributed import run_ranks
from tests.models import collate, pack, random_samples, tiny_model
from tests.parity.training import RTOL, Step, assert_equal, backward, gradients, new_topology, start, uniform


def sharded_logits(model: nn.Module, batch: dict[str, Tensor], sp: int, documents: bool = False) -> Tensor:
    """Logits of the whole sequence, put together from the shards of all ranks."""
    import ds_ulysses

    topology = new_topology(sp)
    ds_ulysses.patch_model(model, topology)
    shard = ds_ulysses.shard_batch({k: v for k, v in batch.items() if k != "labels"}, topology)
    assert shard["placement"].packed == documents
    with torch.no_grad():
        logits = model(**shard).logits
    ds_ulysses.unpatch_model(model)
    parts = [torch.empty_like(logits) for _ in range(sp)]
    dist.all_gather(parts, logits.contiguous(), group=topology.sp_group)
    return torch.cat(parts, dim=1)


def check_logits() -> None:
    """Without positions in the batch, and for every row of it."""
    model, samples = tiny_model(), random_samples([32, 32])
    batch = collate(samples)
    right = copy.deepcopy(model).double()(input_ids=batch["input_ids"]).logits
    found = sharded_logits(model, {"input_ids": batch["input_ids"]}, dist.get_world_size())
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


def test_positions_are_those_of_the_whole_sequence() -> None:
    run_ranks(check_logits, 4)


def check_packed(lengths: list[list[int]], with_mask: bool) -> None:
    """Each document's logits are those that it has alone, and no document feels another."""
    rows = [random_samples(row, seed) for seed, row in enumerate(lengths)]
    batch = {
        "input_ids": torch.stack([torch.cat([s.ids for s in row]) for row in rows]),
        "position_ids": torch.stack([torch.cat([torch.arange(len(s.ids)) for s in row]) for row in rows]),
    }
    if with_mask:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    model = tiny_model()
    found = sharded_logits(model, batch, dist.get_world_size(), documents=True)
    alone = copy.deepcopy(model).double()
    for index, row in enumerate(rows):
        right = torch.cat([alone(input_ids=s.ids[None]).logits for s in row], dim=1)
        torch.testing.assert_close(found[index : index + 1].double(), right, rtol=1e-5, atol=1e-5)
    changed = dict(batch, input_ids=batch["input_ids"].clone())
    changed["input_ids"][:, 0] = 63 - changed["input_ids"][:, 0]
    other = sharded_logits(model, changed, dist.get_world_size(), documents=True)
    for index, (first, *_) in enumerate(lengths):
        assert not torch.equal(other[index, :first], found[index, :first])
        assert torch.equal(other[index, first:], found[index, first:])


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("lengths", [[[10, 6]], [[8, 8]], [[10, 6], [3, 13]], [[1, 14, 1], [16]]], ids=str)
def test_packed_documents_do_not_see_each_other(lengths: list[list[int]], with_mask: bool) -> None:
    run_ranks(check_packed, 2, lengths, with_mask)


def check_packed_step() -> None:
    """Loss and gradients of a pack are those of its documents, at every ZeRO stage."""
    documents = random_samples([10, 6, 9], prompt=0.0)
    for stage in range(4):
        model = tiny_model()
        loss, expected = oracle.train_step(model, documents)
        engine = start(Step(2, stage, uniform(1, 1, 1)), model)
        assert backward(engine, [[pack(documents)]]) == [pytest.approx(loss, rel=RTOL)]
        assert_equal(gradients(engine), expected, "gradient")


def test_a_pack_trains_like_its_documents() -> None:
    run_ranks(check_packed_step, 2)
