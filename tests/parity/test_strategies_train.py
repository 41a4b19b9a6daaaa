"""Whole models under the engine equal one process with every strategy, as they do with Ulysses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import oracle
from tests.distributed import run_ranks
from tests.models import pack, random_samples, tiny_model
from tests.parity.training import (
    RTOL,
    Step,
    assert_equal,
    at_every_stage,
    backward,
    check_all,
    gradients,
    start,
    uniform,
)
from tests.quick import slow, slow_but

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "ulysses": (4, {"strategy": "ulysses"}),
    "head groups": (4, {"strategy": "ulysses", "ulysses_head_groups": 2}),
    "ring": (4, {"strategy": "ring"}),
    "contiguous ring": (4, {"strategy": "ring", "layout": "contiguous"}),
    "all_gather": (4, {"strategy": "all_gather"}),
    "2x2": (4, {"strategy": "hierarchical", "ulysses_size": 2, "ring_size": 2}),
    "4x2": (8, {"strategy": "hierarchical", "ulysses_size": 4}),
}
"""sp_size and the block of options; 4 ranks share 2 KV heads in 4x2."""


def step_of(way: str, **changes: Any) -> Step:
    sp, block = WAYS[way]
    lengths = (((30, 9),), ((13, 16),))
    return replace(Step(sp, 0, lengths, config={"ds_ulysses": block}), **changes)


@pytest.mark.parametrize("packed", [slow(False), True], ids=["padded", "packed"])
@pytest.mark.parametrize("model", ["llama", slow("qwen3")])
@pytest.mark.parametrize("way", [slow(way) if way == "4x2" else way for way in WAYS if way != "contiguous ring"])
def test_every_stage(way: str, model: str, packed: bool) -> None:
    """Two micro-batches of uneven documents, none a multiple of the ranks."""
    run_ranks(check_all, WAYS[way][0], at_every_stage(step_of(way, model=model, packed=packed)))


@pytest.mark.parametrize("way", slow_but({"ulysses", "2x2"}, WAYS))
def test_recomputation_windows_and_replicas(way: str) -> None:
    """Both kinds of gradient checkpointing; layers with and without a window; two replicas of two ranks."""
    sp, block = WAYS[way]
    layers = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    steps = [step_of(way, stage=2, checkpointing=reentrant) for reentrant in (False, True)]
    steps += [step_of(way, stage=2, model="gemma3_text", model_changes=layers, packed=packed) for packed in (0, 1)]
    if "ulysses_size" not in block:
        steps.append(Step(2, 3, uniform(2, 2, 2), config={"ds_ulysses": block}))
    run_ranks(check_all, sp, steps)


def check_compiled(way: str) -> None:
    """torch.compile around the whole model, packed, with the same result."""
    documents = random_samples([10, 6, 13])
    model = tiny_model()
    loss, expected = oracle.train_step(model, documents)
    engine = start(step_of(way, stage=1, lengths=uniform(1, 1, 1)), model)
    engine.module.compile(backend="aot_eager")
    assert backward(engine, [[pack(documents)]]) == [pytest.approx(loss, rel=RTOL)]
    assert_equal(gradients(engine), expected, "gradient")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["head groups", "all_gather", "2x2"])
def test_compiled(way: str) -> None:
    run_ranks(check_compiled, WAYS[way][0], way)


def check_bf16(way: str) -> None:
    """Loss and direction of the gradients are those of the same weights in fp64, as far as bf16 resolves them."""
    documents = random_samples([30, 9, 25])
    model = tiny_model().to(torch.bfloat16)
    loss, expected = oracle.train_step(model, documents)
    engine = start(step_of(way, stage=2, lengths=uniform(1, 1, 1), config={
        "bf16": {"enabled": True}, "ds_ulysses": WAYS[way][1],
    }), model)  # fmt: skip
    assert backward(engine, [[pack(documents)]]) == [pytest.approx(loss, rel=1e-2)]
    for name, gradient in gradients(engine).items():
        right = expected[name].flatten()
        assert torch.cosine_similarity(gradient.double().flatten(), right, dim=0) > 0.995, name


@pytest.mark.parametrize("way", slow_but({"2x2"}, WAYS))
def test_bf16(way: str) -> None:
    run_ranks(check_bf16, WAYS[way][0], way)
