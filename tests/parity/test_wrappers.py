"""Adapters, outer modules, torch.compile and bf16 around the model change nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import oracle
from tests.distributed import run_ranks
from tests.models import collate, random_samples, tiny_model
from tests.parity.training import Step, assert_equal, backward, gradients, new_topology, start, uniform, weights


class Outer(nn.Module):
    """Somebody's own wrapper."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)


def lora(model: Any, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    wrapped = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    )
    return wrapped.train()


def check_exchanges_through_wrappers() -> None:
    import ds_ulysses

    topology = new_topology(2)
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
