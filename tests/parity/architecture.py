"""A whole model, packed, on real ranks with every strategy, against each document alone in one process."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import oracle
from tests.models import pack, random_samples, tiny_model
from tests.oracle import Sample

RTOL = 1e-5
DOCUMENTS = [10, 6]
"""Tokens: every cut in 2 or 4 shards goes through one of them."""
WAYS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"ulysses": {"strategy": "ulysses"}, "ring": {"strategy": "ring"}},
    4: {
        "ulysses": {"strategy": "ulysses"},
        "ring": {"strategy": "ring"},
        "hierarchical": {"strategy": "hierarchical", "ulysses_size": 2, "ring_size": 2},
    },
}
"""By number of ranks."""


def worst_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Largest elementwise error over the largest entry of its tensor, beyond rounding of the largest of all."""
    assert found.keys() == expected.keys()
    noise = 1e-7 * max(right.abs().max().item() for right in expected.values())
    errors = [
        (max((found[name].double() - right).abs().max().item() - noise, 0.0) / (right.abs().max().item() or 1.0), name)
        for name, right in expected.items()
    ]
    assert all(math.isfinite(error) for error, _ in errors), errors
    return max(errors)


def whole_logits(model: nn.Module, shard: dict[str, Any], topology: Any) -> Tensor:
    """[B, T, V], put together from the shards of all ranks; `shard` without targets."""
    with torch.no_grad():
        logits = model(**shard).logits
    rows, tokens = logits.shape[0], logits.shape[1] * topology.sp_size
    places = torch.from_numpy(shard["placement"].token_places()).expand(rows, -1)
    whole = logits.new_zeros(rows, tokens, logits.shape[2])
    whole[torch.arange(rows)[:, None], places] = logits
    dist.all_reduce(whole, group=topology.sp_group)
    return whole


def check_way(model: nn.Module, documents: list[Sample], block: dict[str, Any], expected: Any) -> float:
    """Logits, loss and every gradient with one strategy. Returns the worst relative error."""
    import ds_ulysses

    logits, loss, gradients = expected
    world = dist.get_world_size()
    config = {"sequence_parallel_size": world, "ds_ulysses": block}
    topology = ds_ulysses.Topology.create(ds_ulysses.SequenceParallelConfig.from_deepspeed(config))
    ds_ulysses.patch_model(model, topology)
    model.zero_grad()
    shard = ds_ulysses.shard_batch(pack(documents), topology)
    mean = model(**shard).loss
    mean.backward()
    summed = {}
    for name, parameter in model.named_parameters():
        summed[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(summed[name])
    shard.pop("shift_labels")
    found = whole_logits(model, shard, topology)[:, : logits.shape[1]]
    ds_ulysses.unpatch_model(model)
    worst, name = worst_error(summed, gradients)
    errors = {
        "logits": worst_error({"": found}, {"": logits})[0],
        "loss": abs(mean.item() - loss) / abs(loss),
        f"gradient of {name}": worst,
    }
    assert all(error <= RTOL for error in errors.values()), (block, errors)
    return max(errors.values())


def check_architecture(kind: str, changes: dict[str, Any]) -> float:
    """With every strategy of this number of ranks; returns the worst relative error."""
    model = tiny_model(kind, **changes)
    documents = random_samples(DOCUMENTS, prompt=0.0)
    loss, gradients = oracle.train_step(model, documents)
    alone = oracle.exact_copy(model)
    with torch.no_grad():
        logits = torch.cat([alone(input_ids=d.ids[None]).logits for d in documents], dim=1)
    expected = logits, loss, gradients
    return max(check_way(model, documents, block, expected) for block in WAYS[dist.get_world_size()].values())
