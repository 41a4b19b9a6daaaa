"""The patcher changes one model, undoes it, and refuses by name what would not be exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ds_ulysses
from ds_ulysses.models.patch import ATTENTION_NAME, _attention_forward
from tests.distributed import run_ranks
from tests.models import collate, random_samples, tiny_model
from tests.parity.training import Step, new_topology, start, uniform


def check_one_model_only() -> None:
    """A second model that shares the very config keeps its attention; undoing gives bit-equal results."""
    from transformers import LlamaForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    model = tiny_model()
    reference = LlamaForCausalLM(model.config).eval()
    reference.load_state_dict(model.state_dict())
    assert reference.config is model.config
    batch = collate(random_samples([16]))
    right = reference(**batch)
    plain_keys, plain_modules = list(model.state_dict()), [name for name, _ in model.named_modules()]

    ds_ulysses.patch_model(model, new_topology(2))
    assert model.config._attn_implementation == ATTENTION_NAME
    assert reference.config._attn_implementation == "sdpa"
    assert list(model.state_dict()) == plain_keys
    with ds_ulysses.ledger() as book:
        again = reference(**batch)
    assert torch.equal(again.logits, right.logits)
    assert book.entries == []

    ds_ulysses.unpatch_model(model)
    assert [name for name, _ in model.named_modules()] == plain_modules
    undone = model.eval()(**batch)
    assert torch.equal(undone.logits, right.logits)
    assert torch.equal(undone.loss, right.loss)
    after = dict(ALL_ATTENTION_FUNCTIONS.items())
    assert {name: after[name] for name in before} == before
    ds_ulysses.patch_model(model, new_topology(2))  # and it can be patched again


def check_misuse() -> None:
    """What did not come from shard_batch is refused, not guessed."""
    model = tiny_model()
    batch = collate(random_samples([16]))
    ids = batch["input_ids"]
    with pytest.raises(ValueError, match="not patched"):
        ds_ulysses.unpatch_model(model)
    ds_ulysses.patch_model(model, new_topology(2))
    with pytest.raises(ValueError, match="patched already"):
        ds_ulysses.patch_model(model, new_topology(2))
    with pytest.raises(ValueError, match="labels would be shifted inside the shard"):
        model(**batch)
    with pytest.raises(ValueError, match="position_ids are missing"):
        model(input_ids=ids)
    shard = ds_ulysses.shard_batch({"input_ids": ids}, model._ds_ulysses_patch.topology)
    with pytest.raises(ValueError, match="attention_mask cannot be used on a shard"):
        model(**shard, attention_mask=torch.ones_like(shard["input_ids"]))
    with pytest.raises(ValueError, match="exactly one Hugging Face model.*none"):
        ds_ulysses.patch_model(nn.Linear(2, 2), new_topology(2))
    with pytest.raises(ValueError, match=r"exactly one Hugging Face model.*0, 1"):
        ds_ulysses.patch_model(nn.ModuleList([tiny_model(), tiny_model()]), new_topology(2))


def check_bypass() -> None:
    """Attention that is replaced after patching is noticed in the first forward."""
    model = tiny_model()
    ds_ulysses.patch_model(model, new_topology(2))
    model.set_attn_implementation("sdpa")
    shard = ds_ulysses.shard_batch(collate(random_samples([16])), model._ds_ulysses_patch.topology)
    with pytest.raises(ValueError, match=r"2 of 2 attention layers.*model.layers.0.self_attn"):
        model(**shard)


def check_attention_keywords() -> None:
    """Keywords that change attention are honoured or refused; see test_training for windows."""
    import types

    from transformers import LlamaConfig

    seen: dict[str, Any] = {}

    def spy(q: Any, k: Any, v: Any, mask: Any, placement: Any, sinks: Any) -> Any:
        seen.update(mask=mask, placement=placement, sinks=sinks)
        return q

    layer = nn.Module()
    layer.config = LlamaConfig()
    attention: Any = ds_ulysses.DistributedAttention()
    attention.forward = types.MethodType(lambda self, *args: spy(*args), attention)
    layer.distributed_attention = attention
    x = torch.zeros(1, 4, 6, 8)
    marker = object()
    _attention_forward(
        layer, x, x, x, None, scaling=0.25, sliding_window=5, softcap=30.0, placement=marker, dropout=0.0,
        position_ids=x, use_cache=False, cu_seq_lens_q=None, s_aux=x[0, :, 0, 0],
    )  # fmt: skip
    assert (seen["mask"].scale, seen["mask"].left, seen["mask"].right, seen["mask"].softcap) == (0.25, 4, 0, 30.0)
    assert seen["placement"] is marker
    assert seen["sinks"].shape == (4,)
    for wrong, message in (
        ({"dropout": 0.1}, "dropout"), ({"head_mask": x}, "head_mask"), ({"position_bias": x}, "position_bias"),
        ({"output_attentions": True}, "output_attentions"), ({"is_causal": False}, "bidirectional attention"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"asked for {message}"):
            _attention_forward(layer, x, x, x, None, **wrong)
    with pytest.raises(ValueError, match="asked for a mask"):
        _attention_forward(layer, x, x, x, torch.zeros(1, 1, 6, 6))


@pytest.mark.parametrize(
    ("check", "world"),
    [(check_one_model_only, 2), (check_misuse, 2), (check_bypass, 2), (check_attention_keywords, 1)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_patch(check: Any, world: int) -> None:
    run_ranks(check, world)


def check_refusal_leaves_the_model_alone() -> None:
    refused: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
        ({"attention_dropout": 0.1}, {}, "attention_dropout"),
        ({}, {"ds_ulysses": {"kernel": "flash_attn_2"}}, "flash_attn_2"),
        ({}, {"zero_optimization": {"stage": 3, "reduce_scatter": False}}, "reduce_scatter"),
        ({}, {"train_batch_size": 7}, "train_batch_size"),
        ({}, {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr"),
        ({}, {"sequence_parallel_size": 3}, "2 ranks are not a multiple"),
    )
    for changes, config, message in refused:
        model = tiny_model(**changes)
        with pytest.raises(ValueError, match=message):
            start(Step(2, 2, uniform(1, 1, 1), config=config), model)
        assert model.config._attn_implementation == "sdpa"
        assert not hasattr(model, "_ds_ulysses_patch")


def test_a_refusal_leaves_the_model_alone() -> None:
    run_ranks(check_refusal_leaves_the_model_alone, 2)


def check_own_output_layer() -> None:
    model = tiny_model()
    model.lm_head = nn.Linear(32, 64, bias=True)
    with pytest.raises(ValueError, match="output layer of LlamaForCausalLM"):
        ds_ulysses.patch_model(model, new_topology(1))


def test_an_output_layer_of_another_kind_is_refused() -> None:
    run_ranks(check_own_output_layer, 1)
