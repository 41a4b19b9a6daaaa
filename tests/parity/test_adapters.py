"""Adapters: what is saved opens with peft, and nothing but the adapter is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import ds_ulysses
from ds_ulysses.engine.checkpoint import save_pretrained
from tests.distributed import run_ranks
from tests.models import collate, random_samples, tiny_model
from tests.parity.test_wrappers import lora
from tests.parity.training import Step, backward, start, uniform


def check_saved(folder: str, stage: int, options: dict[str, Any]) -> None:
    base, adapter = Path(folder) / "base", Path(folder) / "adapter"
    samples = random_samples([16])
    engine = start(Step(2, stage, uniform(1, 1, 1)), lora(AutoModelForCausalLM.from_pretrained(base), **options))
    backward(engine, [[collate(samples)]])
    engine.step()
    save_pretrained(engine, adapter)
    with torch.no_grad():
        shard = ds_ulysses.shard_batch({"input_ids": samples[0].ids[None]}, engine.topology)
        logits = engine.module(**shard).logits
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    untrained = plain(input_ids=samples[0].ids[None]).logits.chunk(2, dim=1)[engine.topology.sp_rank]
    loaded = PeftModel.from_pretrained(plain, adapter)
    right = loaded(input_ids=samples[0].ids[None]).logits.chunk(2, dim=1)[engine.topology.sp_rank]
    torch.testing.assert_close(logits, right, rtol=1e-5, atol=1e-5)
    assert (right - untrained).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("stage", "options"),
    [(0, {}), (2, {"modules_to_save": ["embed_tokens"]}), (3, {}), (3, {"modules_to_save": ["embed_tokens"]})],
)
def test_saved_adapter_opens_with_peft(tmp_path: Path, stage: int, options: dict[str, Any]) -> None:
    tiny_model().save_pretrained(tmp_path / "base")
    before = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
    run_ranks(check_saved, 2, str(tmp_path), stage, options)
    assert {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()} == before
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {name for name in names if "lora_" not in name} == {
        f"base_model.model.model.{name}.weight" for name in options.get("modules_to_save", [])
    }
    assert not (tmp_path / "adapter" / "model.safetensors").exists()


def check_unwrapped(folder: str) -> None:
    model = inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), tiny_model())
    engine = start(Step(1, 0, uniform(1, 1, 1)), model)
    with pytest.raises(ValueError, match="peft does not wrap it"):
        save_pretrained(engine, folder)


def test_adapters_without_peft_are_not_saved(tmp_path: Path) -> None:
    run_ranks(check_unwrapped, 1, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
