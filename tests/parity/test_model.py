"""Faults that others have had, one test each, on real ranks against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import oracle
from tests.distributed import run_ranks
from tests.models import collate, random_samples, tiny_model
from tests.oracle import IGNORE, Sample
from tests.parity.training import LR, RTOL, Step, assert_equal, backward, gradients, start, uniform, weights


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


def sharded_logits(model: nn.Module, batch: dict[str, Tensor], sp: int, documents: bool = False) -> Tensor:
    """Logits of the whole sequence, put together from the shards of all ranks."""
    import ds_ulysses

    topology = ds_ulysses.Topology.create(ds_ulysses.SequenceParallelConfig(sequence_parallel_size=sp))
    ds_ulysses.patch_model(model, topology)
    shard = ds_ulysses.shard_batch({k: v for k, v in batch.items() if k != "labels"}, topology)
    assert ("documents" in shard) == documents
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
    for index, row in enumerate(lengths):
        assert not torch.equal(other[index, : row[0]], found[index, : row[0]])
        assert torch.equal(other[index, row[0] :], found[index, row[0] :])


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("lengths", [[[10, 6]], [[8, 8]], [[10, 6], [3, 13]], [[1, 14, 1], [16]]], ids=str)
def test_packed_documents_do_not_see_each_other(lengths: list[list[int]], with_mask: bool) -> None:
    run_ranks(check_packed, 2, lengths, with_mask)


def check_packed_step() -> None:
    """Loss and gradients of a pack are those of its documents, at every ZeRO stage."""
    documents = random_samples([10, 6, 9], prompt=0.0)
    batch = {
        "input_ids": torch.cat([s.ids for s in documents])[None],
        "labels": torch.cat([s.labels for s in documents])[None],
        "position_ids": torch.cat([torch.arange(len(s.ids)) for s in documents])[None],
    }
    for stage in range(4):
        model = tiny_model()
        loss, expected = oracle.train_step(model, documents)
        engine = start(Step(2, stage, uniform(1, 1, 1)), model)
        assert backward(engine, [[batch]]) == [pytest.approx(loss, rel=RTOL)]
        assert_equal(gradients(engine), expected, "gradient")


def test_a_pack_trains_like_its_documents() -> None:
    run_ranks(check_packed_step, 2)


def check_three_steps(stage: int) -> None:
    """Weights stay the same on all ranks and equal to one process over several steps."""
    steps = [random_samples([16], seed) + random_samples([12], seed + 10) for seed in range(3)]
    plain = tiny_model().double()
    for samples in steps:
        _, grads = oracle.train_step(plain, samples)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter -= LR * grads[name]
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

    topology = ds_ulysses.Topology.create(ds_ulysses.SequenceParallelConfig(sequence_parallel_size=2))
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


class Outer(nn.Module):
    """Somebody's own wrapper."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)


def lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return wrapped.train()


def check_exchanges_through_wrappers() -> None:
    import ds_ulysses

    topology = ds_ulysses.Topology.create(ds_ulysses.SequenceParallelConfig(sequence_parallel_size=2))
    batch = ds_ulysses.shard_batch(collate(random_samples([16])), topology)
    losses = set()
    for order in ("wrap, patch", "patch, wrap", "outer"):
        model = tiny_model()
        if order == "patch, wrap":
            ds_ulysses.patch_model(model, topology)
            model = lora(model)
        else:
            model = Outer(lora(model)) if order == "outer" else lora(model)
            ds_ulysses.patch_model(model, topology)
        with ds_ulysses.ledger() as book:
            losses.add(model(**batch).loss.item())
        assert book.count("all_to_all") == 4, order
    assert len(losses) == 1


def test_order_of_patching_and_wrapping() -> None:
    run_ranks(check_exchanges_through_wrappers, 2)


def check_lora() -> None:
    """LoRA under each ZeRO stage and both kinds of gradient checkpointing; the base weights stay."""
    samples = random_samples([16])
    for stage, reentrant in [(0, None), (2, False), (3, None), (3, False), (3, True)]:
        model = lora(tiny_model())
        _, expected = oracle.train_step(model, samples)
        if reentrant is not None:
            model.enable_input_require_grads()
        before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
        zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
        engine = start(Step(2, stage, uniform(1, 1, 1), zero=zero, checkpointing=reentrant), model)
        backward(engine, [[collate(samples)]])
        found = gradients(engine)
        assert len(found) == 8
        assert_equal(found, {name: expected[name] for name in found}, f"stage {stage}, {reentrant}: gradient")
        engine.step()
        assert all(torch.equal(w, before[n]) for n, w in weights(engine).items() if n in before)


def test_lora() -> None:
    run_ranks(check_lora, 2)


def check_compiled() -> None:
    """Whole model and single layer: q, k and v projections get the eager gradients, not zero."""
    samples = random_samples([16])
    for part in ("model", "layer"):
        model = tiny_model()
        _, expected = oracle.train_step(model, samples)
        engine = start(Step(2, 1, uniform(1, 1, 1)), model)
        target = engine.module if part == "model" else engine.module.model.layers[1]
        target.compile(backend="aot_eager")
        backward(engine, [[collate(samples)]])
        assert_equal(gradients(engine), expected, f"compiled {part}: gradient")


def test_compiled() -> None:
    run_ranks(check_compiled, 2)


def check_bf16() -> None:
    """In bf16 the gradients are as near to the exact ones as those of one bf16 process."""
    samples = random_samples([32])
    for stage in (0, 1, 2, 3):
        model = tiny_model(tie_word_embeddings=True).bfloat16()
        _, exact = oracle.train_step(model, samples)
        plain = copy.deepcopy(model)
        plain(input_ids=samples[0].ids[None], labels=samples[0].labels[None], use_cache=False).loss.backward()
        config = {"bf16": {"enabled": True}}
        engine = start(Step(2, stage, uniform(1, 1, 1), config=config), model)
        backward(engine, [[collate(samples)]])
        found = gradients(engine)
        for name, parameter in plain.named_parameters():
            error, usual = ((g.double() - exact[name]).norm() for g in (found[name], parameter.grad))
            assert error <= 2 * usual + 1e-3 * exact[name].norm(), (stage, name, error, usual)
        norm = torch.stack([g.norm() for g in exact.values()]).norm().item()
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-2)


def test_bf16() -> None:
    run_ranks(check_bf16, 2)


def check_saved(folder: str, stage: int) -> None:
    from transformers import AutoModelForCausalLM

    import ds_ulysses
    from ds_ulysses.checkpoint import save_pretrained

    samples = random_samples([16])
    model = tiny_model(tie_word_embeddings=stage % 2 == 0)
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


def check_adapters_are_not_saved_as_a_whole(folder: str) -> None:
    from ds_ulysses.checkpoint import save_pretrained

    with pytest.raises(ValueError, match="with adapters cannot be saved"):
        save_pretrained(start(Step(1, 0, uniform(1, 1, 1)), lora(tiny_model())), folder)


def test_adapters_are_not_saved_as_a_whole(tmp_path: Any) -> None:
    run_ranks(check_adapters_are_not_saved_as_a_whole, 1, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_saved_equals_live(stage: int, tmp_path: Any) -> None:
    run_ranks(check_saved, 2, str(tmp_path), stage)
