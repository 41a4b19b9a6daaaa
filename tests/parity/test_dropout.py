"""Random numbers differ between the shards of a sequence, and are the same when a run is repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ds_ulysses
from tests.distributed import run_ranks
from tests.models import tiny_model
from tests.parity.test_wrappers import lora
from tests.parity.training import new_topology


def dropped(model: Any, topology: Any) -> Tensor:
    """Which of the channels of each local token the first dropout lets through."""
    seen: list[Tensor] = []
    layer = next(m for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.p)
    handle = layer.register_forward_hook(lambda module, args, out: seen.append(out == 0))
    model(**ds_ulysses.shard_batch({"input_ids": torch.ones(1, 16, dtype=torch.long)}, topology))
    handle.remove()
    return seen[0]


def check() -> tuple[list[list[bool]], str]:
    topology = new_topology(2)
    model = lora(tiny_model(), lora_dropout=0.5)
    ds_ulysses.patch_model(model, topology)
    torch.manual_seed(7)
    with pytest.raises(ValueError, match=r"Dropout is on .*lora_dropout.*random seed is 7 on all ranks") as refusal:
        dropped(model, topology)
    ds_ulysses.unpatch_model(model)
    ds_ulysses.patch_model(model, topology)
    runs = []
    for _ in range(2):
        torch.manual_seed(7 + topology.rank)
        runs.append(dropped(model, topology))
    assert torch.equal(*runs)
    model.eval()
    torch.manual_seed(7)
    assert not dropped(model, topology).all()  # evaluation drops nothing, whatever the seed
    return runs[0].flatten().tolist(), str(refusal.value)


def test_shards_drop_different_positions() -> None:
    (first, said), (second, also_said) = run_ranks(check, 2)
    assert said == also_said
    assert first != second
    assert 0.3 < sum(first) / len(first) < 0.7


def check_residual_dropout() -> None:
    """Dropout that is a number in a layer, not a module of its own."""
    topology = new_topology(2)
    model = tiny_model("starcoder2", residual_dropout=0.1)
    ds_ulysses.patch_model(model, topology)
    torch.manual_seed(1)
    with pytest.raises(ValueError, match=r"Dropout is on .residual_dropout=0.1"):
        model(**ds_ulysses.shard_batch({"input_ids": torch.ones(1, 16, dtype=torch.long)}, topology))


def test_dropout_in_the_config() -> None:
    run_ranks(check_residual_dropout, 2)
