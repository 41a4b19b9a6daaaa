"""Which tokens count in the loss: shard edges, shards and batches without targets, replicas."""

from __future__ import annotations

import pytest
import torch

from tests import oracle
from tests.distributed import run_ranks
from tests.models import collate, random_samples, tiny_model
from tests.oracle import IGNORE, Sample
from tests.parity.training import RTOL, Step, assert_equal, backward, gradients, start, uniform, weights


def supervised(length: int, positions: list[int]) -> Sample:
    """A document with labels at these positions only."""
    (sample,) = random_samples([length])
    labels = torch.full_like(sample.labels, IGNORE)
    labels[positions] = sample.ids[positions]
    return Sample(sample.ids, labels)


def check_labels(sp: int, stage: int, positions: list[list[int]]) -> None:
    """One sample per replica, supervised at these positions only."""
    samples = [supervised(16, chosen) for chosen in positions]
    model = tiny_model()
    loss, expected = oracle.train_step(model, samples)
    engine = start(Step(sp, stage, uniform(len(samples), 1, 1)), model)
    (found,) = backward(engine, [[collate([sample]) for sample in samples]])
    assert found == pytest.approx(loss, rel=RTOL)
    assert_equal(gradients(engine), expected, "gradient")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("sp", "positions"), [(2, [8]), (4, [4, 8, 12]), (4, list(range(9, 16))), (2, [15]), (2, [1])])
def test_targets_at_shard_edges_and_shards_without_any(sp: int, positions: list[int], stage: int) -> None:
    run_ranks(check_labels, sp, sp, stage, [positions])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_replicas_weigh_by_their_targets(stage: int) -> None:
    run_ranks(check_labels, 8, 4, stage, [list(range(9, 16)), [3, 14]])


def check_nothing_supervised(stage: int) -> None:
    model = tiny_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = start(Step(2, stage, uniform(1, 1, 1)), model)
    silent, spoken = supervised(16, []), supervised(16, [3, 9])
    assert backward(engine, [[collate([silent])]]) == [0.0]
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in gradients(engine).values())
    engine.step()
    assert all(torch.equal(w, before[name]) for name, w in weights(engine).items())
    loss, expected = oracle.train_step(tiny_model(), [spoken])
    assert backward(engine, [[collate([spoken])]]) == [pytest.approx(loss, rel=RTOL)]
    assert_equal(gradients(engine), expected, "gradient")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_target_anywhere_is_no_step_and_no_nan(stage: int) -> None:
    run_ranks(check_nothing_supervised, 2, stage)
