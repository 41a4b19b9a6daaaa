"""Checkpoints become Hugging Face folders with the logits of the trained model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ds_ulysses.commands.main import main
from tests.quick import slow
from tests.training.trainer import inputs, log_of, sft

FLAGS = ("--max_steps", "2", "--save_steps", "2")
LORA = ("--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--lora_dropout", "0")


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(1, 21)[None]).logits.float()


@pytest.mark.parametrize("tied", [slow(False), True])
@pytest.mark.parametrize("stage", [slow(0), slow(1), slow(2), 3])
def test_export_of_a_model(tmp_path: Path, stage: int, tied: bool) -> None:
    """Of ZeRO at every stage; what the end of training saved itself is the oracle."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = inputs(tmp_path, 4, tie_word_embeddings=tied)
    assert sft(folder, 2, tmp_path / "run", *FLAGS, stage=stage) == [""] * 2
    main(["export", str(tmp_path / "run" / "checkpoint-2"), str(tmp_path / "out")])
    right = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    found, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(found), logits(right))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert (tmp_path / "out" / "generation_config.json").exists()


@pytest.mark.slow
def test_what_one_rank_saved_trains_on_on_two(tmp_path: Path) -> None:
    folder = inputs(tmp_path, 4)
    assert sft(folder, 1, tmp_path / "first", *FLAGS, stage=2) == [""]
    flags = (*FLAGS, "--model_name_or_path", str(tmp_path / "first"))
    assert sft(folder, 1, tmp_path / "one", *flags, stage=2) == [""]
    assert sft(folder, 2, tmp_path / "two", *flags, stage=3) == [""] * 2
    for key in ("loss", "grad_norm"):
        one, two = ([entry[key] for entry in log_of(tmp_path / run)] for run in ("one", "two"))
        assert two == pytest.approx(one, rel=1e-5), key


def test_export_of_an_adapter_alone_and_merged(tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    folder = inputs(tmp_path, 4)
    assert sft(folder, 2, tmp_path / "run", *FLAGS, *LORA, stage=3) == [""] * 2
    main(["export", str(tmp_path / "run" / "checkpoint-2"), str(tmp_path / "adapter")])
    main(["export", str(tmp_path / "run" / "checkpoint-2"), str(tmp_path / "merged"), "--merge"])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    untrained = logits(base)
    right = logits(PeftModel.from_pretrained(base, tmp_path / "run"))
    assert (right - untrained).abs().max() > 1e-3
    assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")), right)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), right)
    assert not list((tmp_path / "adapter").glob("model*"))
    assert not list((tmp_path / "merged").glob("adapter*"))


@pytest.mark.slow
def test_dtype_and_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    folder = inputs(tmp_path, 4)
    assert sft(folder, 1, tmp_path / "run", *FLAGS, stage=2) == [""]
    checkpoint, out = str(tmp_path / "run" / "checkpoint-2"), str(tmp_path / "out")
    main(["export", checkpoint, out, "--dtype", "bf16"])
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    before = sorted(tmp_path.rglob("*"))
    for arguments, message in (
        ([checkpoint, out], "is not empty"),
        ([str(tmp_path), str(tmp_path / "other")], "is no whole checkpoint: it has no manifest.json"),
        ([checkpoint, str(tmp_path / "other"), "--merge"], "has no adapter"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(["export", *arguments])
    assert sorted(tmp_path.rglob("*")) == before
    os.truncate(next((tmp_path / "run" / "checkpoint-2" / "state").glob("*optim*")), 100)
    with pytest.raises(SystemExit, match=r"optim_states.pt has 100 bytes instead of [\d,]+\. Give a folder"):
        main(["export", checkpoint, str(tmp_path / "other")])
    assert sorted(tmp_path.rglob("*")) == before
