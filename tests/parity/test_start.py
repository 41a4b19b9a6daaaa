"""One start: what was settled before there were weights is what `initialize` goes on with."""

from __future__ import annotations

import pytest
import torch

import ds_ulysses
from ds_ulysses.kernels import KERNELS
from tests.distributed import run_ranks
from tests.models import collate, random_samples, tiny_model
from tests.parity.training import backward


def check_start() -> None:
    model = tiny_model()
    config = {
        "sequence_parallel_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "ds_ulysses": {"strategy": "ring"},
    }
    start = ds_ulysses.settle(model.config, config)
    assert (start.topology.mesh.strategy, start.topology.sp_size) == ("ring", 2)
    assert (start.kernel, start.kernel_reason) == (KERNELS["cpu_flash"], "the fastest that can")
    assert start.config == config

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = {**config, "ds_ulysses": {"strategy": "ulysses"}}
    with pytest.raises(ValueError, match="different things: \"strategy\": 'ring' and 'ulysses'; one would be ignored"):
        ds_ulysses.initialize(model, other, topology=start.topology, optimizer=optimizer)
    engine, *_ = ds_ulysses.initialize(model, config, topology=start.topology, optimizer=optimizer)
    assert engine.topology is start.topology
    assert backward(engine, [[collate(random_samples([16]))]])[0] > 0


def test_start() -> None:
    run_ranks(check_start, 2)


def check_refusals() -> None:
    from transformers import LlamaConfig, MambaConfig

    with pytest.raises(ValueError, match="mamba model cannot be trained"):
        ds_ulysses.settle(MambaConfig(), {"sequence_parallel_size": 2})
    with pytest.raises(ValueError, match="'flash_attn_3', but it runs on cuda"):
        ds_ulysses.settle(LlamaConfig(), {"sequence_parallel_size": 2, "ds_ulysses": {"kernel": "flash_attn_3"}})


def test_what_cannot_be_exact_is_refused_before_there_are_weights() -> None:
    run_ranks(check_refusals, 2)
