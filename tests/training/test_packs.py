"""Packs, padding-free batches and adapters through the whole trainer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.training.trainer import inputs, log_of, sft


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return inputs(tmp_path_factory.mktemp("packs"), num_samples=10)


def test_packs_train_like_padded_rows_and_like_single_samples(folder: Path, tmp_path: Path) -> None:
    """Two epochs of one step each: all 10 samples one by one, in padded rows, without padding, and packed on 2 x 2."""
    for name, ranks, *flags in (
        ("alone", 1, "--gradient_accumulation_steps", "10"),
        ("padded", 2, "--per_device_train_batch_size", "10"),
        ("flat", 2, "--per_device_train_batch_size", "10", "--padding_free"),
        ("packs", 4, "--gradient_accumulation_steps", "5", "--packing", "--sequence_parallel_size", "2"),
    ):
        assert sft(folder, ranks, tmp_path / name, *flags, "--num_train_epochs", "2") == [""] * ranks
    alone, *others = (log_of(tmp_path / name) for name in ("alone", "padded", "flat", "packs"))
    assert len(alone) == 2
    for log in others:
        for key in ("loss", "grad_norm", "num_tokens", "epoch"):
            assert [e[key] for e in log] == pytest.approx([e[key] for e in alone], rel=1e-5), key
    padded, flat, packs = (log[0]["padding"] for log in others)
    assert padded > 0.2 > 0.02 > flat
    assert packs < 0.02
    assert others[2][0]["imbalance"] < 1.2
    said = (folder / "said").read_text()
    for part in (
        r"batch +10 packs of up to 60 tokens per optimizer step = 1 per micro-batch x 5 accumulated x data-parallel 2;",
        r"padding +\d\.\d% of all computed tokens; as many micro-batches of padded rows would be \d+\.\d% padding",
        r"balance +busiest replica 1\.\d+x the mean; 5 micro-batches per replica and epoch, with one sample each 5;",
        r"strategy +ulysses, contiguous layout \(packed documents",
    ):
        assert re.search(part, said), part


@pytest.mark.slow
def test_an_adapter_on_a_stream_of_two_datasets(folder: Path, tmp_path: Path) -> None:
    """LoRA under ZeRO-3 with dropout, on 2 x 2 ranks: what is saved opens with peft; the base is as it was."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    before = {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
    data = str(folder / "data.jsonl")
    flags = (
        "--sequence_parallel_size", "2", "--dataset", data, data, "--dataset_weights", "1", "2", "--streaming",
        "--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj", "--lora_dropout", "0.1",
        "--learning_rate", "3e-2", "--packing", "--per_device_train_batch_size", "2", "--max_steps", "8",
    )  # fmt: skip
    assert sft(folder, 4, tmp_path / "out", *flags) == [""] * 4
    losses = [entry["loss"] for entry in log_of(tmp_path / "out")]
    assert len(losses) == 8
    assert sum(losses[-3:]) < sum(losses[:3])
    assert {path.name: path.read_bytes() for path in (folder / "model").iterdir()} == before
    base = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    ids = torch.arange(20)[None]
    untrained = base(input_ids=ids).logits
    adapted = PeftModel.from_pretrained(base, tmp_path / "out")
    assert (adapted(input_ids=ids).logits - untrained).abs().max() > 1e-2
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 4
    assert not list((tmp_path / "out").glob("model*.safetensors"))
