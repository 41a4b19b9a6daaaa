"""The engine over several steps, odd windows, evaluation, loaders and saving."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import oracle
from tests.distributed import run_ranks
from tests.models import VOCAB, collate, random_samples, tiny_model
from tests.parity.training import (
    LR,
    RTOL,
    Step,
    assert_equal,
    backward,
    gradients,
    new_topology,
    start,
    uniform,
    weights,
)


def check_three_steps(stage: int) -> None:
    """Weights stay the same on all ranks and equal to one process over several steps."""
    steps = [random_samples([16], seed) + random_samples([12], seed + 10) for seed in range(3)]
    plain = tiny_model().double()
    for samples in steps:
        _, grads = oracle.train_step(plain, samples)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.sub_(LR * grads[name])
    engine = start(Step(2, stage, uniform(2, 1, 1)), tiny_model())
    for first, second in steps:
        backward(engine, [[collate([first]), collate([second])]])
        engine.step()
    found = weights(engine)
    assert_equal(found, dict(plain.named_parameters()), "weight")
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {name: w.sum().item() for name, w in found.items()})
    assert all(sums == everywhere[0] for sums in everywhere)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_stay_together(stage: int) -> None:
    run_ranks(check_three_steps, 4, stage)


def check_partial_window(stage: int) -> None:
    """Three micro-batches where the config says two: the boundary that the caller sets is the one that counts."""
    import ds_ulysses

    samples = random_samples([16, 9, 30])
    model = tiny_model()
    _, expected = oracle.train_step(model, samples)
    engine = start(Step(2, stage, uniform(1, 1, 2)), model)
    for sample in samples:
        engine.set_gradient_accumulation_boundary(sample is samples[-1])
        engine.backward(engine(**ds_ulysses.shard_batch(collate([sample]), engine.topology)).loss)
    assert_equal(gradients(engine), expected, "gradient")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_window_of_another_length(stage: int) -> None:
    run_ranks(check_partial_window, 2, stage)


def check_torch_style_backward(stage: int) -> None:
    """loss.backward() instead of engine.backward(loss), where DeepSpeed allows it."""
    import ds_ulysses

    samples = random_samples([16, 9])
    model = tiny_model()
    _, expected = oracle.train_step(model, samples)
    engine = start(Step(2, stage, uniform(1, 1, 2)), model)
    for sample in samples:
        engine(**ds_ulysses.shard_batch(collate([sample]), engine.topology)).loss.backward()
        if sample is samples[0]:
            engine.step()
    assert_equal(gradients(engine), expected, "gradient")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_torch_style_backward(stage: int) -> None:
    run_ranks(check_torch_style_backward, 2, stage)


def check_different_batches() -> None:
    import ds_ulysses

    topology = new_topology(2)
    ids = torch.arange(8).view(1, 8)
    rank = dist.get_rank()
    for wrong in (ids + topology.sp_rank, ids[:, : 8 - topology.sp_rank], ids.flip(1) if topology.sp_rank else ids):
        with pytest.raises(ValueError, match=f"by topology.dp_rank .{rank // 2} of 2 here.*global rank .{rank} here"):
            ds_ulysses.shard_batch({"input_ids": wrong}, topology)
    ds_ulysses.shard_batch({"input_ids": ids + topology.dp_rank}, topology)  # replicas may differ
    with pytest.raises(ValueError, match="scale_wrt_gas=False"):
        start(Step(2, 1, uniform(2, 1, 1)), tiny_model()).backward(torch.zeros(()), scale_wrt_gas=False)


def test_ranks_of_one_group_with_different_batches_are_refused() -> None:
    run_ranks(check_different_batches, 4)


def check_evaluation() -> None:
    """Odd lengths, another batch size, token-weighted; the next training step is as if nothing had been."""
    import ds_ulysses

    train, held_out = random_samples([16, 16]), random_samples([9, 10, 11, 12, 13], seed=5)
    model = tiny_model()
    loss, expected = oracle.train_step(model, train)
    eval_loss, _ = oracle.train_step(model, held_out)
    engine = start(Step(2, 2, uniform(2, 1, 1)), model)
    engine.eval()
    total, count = 0.0, 0
    for rows in (held_out[:2], held_out[2:4], held_out[4:]):
        with torch.no_grad():
            batch = ds_ulysses.shard_batch(collate(rows), engine.topology)
            targets = sum(sample.num_targets for sample in rows)
            total, count = total + engine(**batch).loss.item() * targets, count + targets
    assert total / count == pytest.approx(eval_loss, rel=RTOL)
    engine.train()
    assert backward(engine, [[collate([sample]) for sample in train]]) == [pytest.approx(loss, rel=RTOL)]
    assert_equal(gradients(engine), expected, "gradient")


def test_evaluation_is_sharded_and_leaves_no_trace() -> None:
    run_ranks(check_evaluation, 4)


def check_training_data() -> list[list[int]]:
    """DeepSpeed's own loader: ranks of a group get the same samples, replicas others."""
    import ds_ulysses

    data = [{"input_ids": torch.full((8,), i), "labels": torch.full((8,), i)} for i in range(8)]
    model = tiny_model()
    engine, _, loader, _ = ds_ulysses.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), training_data=data,
        config={"sequence_parallel_size": 2, "train_micro_batch_size_per_gpu": 2},
    )  # fmt: skip
    seen = []
    for batch in loader:
        engine.backward(engine(**ds_ulysses.shard_batch(batch, engine.topology)).loss)
        engine.step()
        seen.append(batch["input_ids"][:, 0].tolist())
    return seen


def test_training_data() -> None:
    seen = run_ranks(check_training_data, 4)
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert sorted(i for rank in (0, 2) for batch in seen[rank] for i in batch) == list(range(8))


def check_saved(folder: str, stage: int) -> None:
    from transformers import AutoModelForCausalLM

    import ds_ulysses
    from ds_ulysses.engine.checkpoint import save_pretrained

    samples = random_samples([16])
    model = tiny_model(tie_word_embeddings=stage % 2 == 0)
    model.model.layers[0].requires_grad_(stage == 0)  # frozen weights are saved too
    engine = start(Step(2, stage, uniform(1, 1, 1)), model)
    backward(engine, [[collate(samples)]])
    engine.step()
    save_pretrained(engine, folder)
    live = engine.module
    with torch.no_grad():
        shard = ds_ulysses.shard_batch({"input_ids": samples[0].ids[None]}, engine.topology)
        logits = live(**shard).logits
    saved, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    right = saved(input_ids=samples[0].ids[None]).logits.chunk(2, dim=1)[engine.topology.sp_rank]
    torch.testing.assert_close(logits, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_saved_equals_live(stage: int, tmp_path: Any) -> None:
    run_ranks(check_saved, 2, str(tmp_path), stage)


def check_probe() -> None:
    """The probe finds what DeepSpeed divides by, and says so where it is not what the loss multiplies by."""
    from ds_ulysses.engine.gradients import check_gradient_divisor, gradient_divisor

    topology = new_topology(2)
    for stage, divisor in ((0, 2), (1, 2), (2, 2), (3, 4)):
        config = {"zero_optimization": {"stage": stage}}
        assert gradient_divisor(config, topology) == divisor
        check_gradient_divisor(config, topology, divisor)
        with pytest.raises(ValueError, match=rf"divides gradients by .{divisor}\.0, {divisor}\.0. .*not by 3"):
            check_gradient_divisor(config, topology, 3)
    mixed = {"zero_optimization": {"stage": 3, "reduce_scatter": False}}  # refused by name before it comes to this
    with pytest.raises(ValueError, match=r"divides gradients by .2\.0, 4\.0. .*not by 4"):
        check_gradient_divisor(mixed, topology, 4)


def test_probe() -> None:
    run_ranks(check_probe, 4)


def check_copy() -> None:
    """A deep copy of a patched model trains on its own."""
    import ds_ulysses

    topology = new_topology(2)
    model = tiny_model()
    ds_ulysses.patch_model(model, topology)
    twin = copy.deepcopy(model)
    batch = ds_ulysses.shard_batch(collate(random_samples([16])), topology)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    losses = [m(**batch).loss for m in (model, twin)]
    assert losses[1].item() == pytest.approx(math.log(VOCAB))
    assert losses[0].item() != losses[1].item()
    losses[1].backward()
    assert model.lm_head.weight.grad is None
    assert twin.lm_head.weight.grad is not None


def test_deep_copy() -> None:
    run_ranks(check_copy, 2)
