"""Evaluation under sequence parallelism is that of one process, and leaves training as it was."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.quick import slow
from tests.training.trainer import Fault, evaluations_of, inputs, log_of, sft


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = inputs(tmp_path_factory.mktemp("evaluate"))
    words = "one two three four five six seven eight"
    chats = [
        [{"role": "user", "content": "what"}, {"role": "assistant", "content": " ".join((words * 2).split()[:i])}]
        for i in (3, 4, 5, 6, 7)
    ]
    (folder / "eval.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return folder


def loss_of_one_process(folder: Path, model: Path) -> tuple[float, int]:
    """Mean over the supervised tokens of all samples, each alone, in plain transformers in fp64; and their number."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ds_ulysses.data.chat import tokenize_chat

    live = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").double().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    total, count = 0.0, 0
    for line in (folder / "eval.jsonl").read_text().splitlines():
        sample = tokenize_chat(json.loads(line), tokenizer, 60)
        ids, labels = (torch.tensor([sample[key]]) for key in ("input_ids", "labels"))
        num_targets = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += live(input_ids=ids, labels=labels).loss.item() * num_targets
        count += num_targets
    return total / count, count


EVALUATE = ("--eval_strategy", "steps", "--eval_steps", "2", "--eval_on_start", "--per_device_eval_batch_size", "2")


@pytest.mark.parametrize(
    ("ranks", "stage", "flags"),
    [
        slow(1, 0, ()),
        slow(4, 3, ("--sequence_parallel_size", "2")),
        (2, 2, ("--packing",)),
        slow(2, 1, ("--padding_free",)),
    ],
    ids=str,
)
def test_evaluation_is_that_of_one_process(
    folder: Path, tmp_path: Path, ranks: int, stage: int, flags: tuple[str, ...]
) -> None:
    """Five samples of odd lengths in batches of two, before the first step, after the second and at the end."""
    flags = (*flags, "--max_steps", "3", "--gradient_accumulation_steps", "2")
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    assert sft(folder, ranks, plain, *flags, stage=stage) == [""] * ranks
    flags = (*flags, *EVALUATE, "--eval_dataset", str(folder / "eval.jsonl"))
    assert sft(folder, ranks, watched, *flags, stage=stage) == [""] * ranks
    found = evaluations_of(watched)
    assert [entry["step"] for entry in found] == [0, 2, 3]
    for entry, model in ((found[0], folder / "model"), (found[-1], watched)):
        loss, count = loss_of_one_process(folder, model)
        assert entry["eval_loss"] == pytest.approx(loss, rel=1e-5)
        assert entry["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
        assert entry["eval_num_targets"] == count
    for key in ("loss", "grad_norm", "learning_rate"):
        assert [e[key] for e in log_of(watched)] == [e[key] for e in log_of(plain)], key
    assert (watched / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_dropout_is_off_in_evaluation_and_goes_on_after_it(folder: Path, tmp_path: Path) -> None:
    flags = ("--use_peft", "--lora_dropout", "0.5", "--lora_target_modules", "q_proj", "--max_steps", "4")
    assert sft(folder, 2, tmp_path / "plain", *flags, stage=3) == ["", ""]
    evaluate = (*EVALUATE, "--eval_dataset", str(folder / "eval.jsonl"))
    assert sft(folder, 2, tmp_path / "watched", *flags, *evaluate, stage=3) == ["", ""]
    for key in ("loss", "grad_norm"):
        assert [e[key] for e in log_of(tmp_path / "watched")] == [e[key] for e in log_of(tmp_path / "plain")]
    untrained, _ = loss_of_one_process(folder, folder / "model")  # an adapter begins as no change
    assert evaluations_of(tmp_path / "watched")[0]["eval_loss"] == pytest.approx(untrained, rel=1e-5)


def test_early_stop(folder: Path, tmp_path: Path) -> None:
    """With a learning rate of 0 nothing gets better: the second evaluation without gain is the last.

    What is evaluated before the first step is no result of training.
    """
    flags = (
        "--eval_on_start", "--eval_strategy", "epoch", "--eval_dataset", str(folder / "eval.jsonl"),
        "--early_stopping_patience", "2", "--learning_rate", "0.0", "--per_device_train_batch_size", "6",
        "--num_train_epochs", "9", "--save_steps", "6",
    )  # fmt: skip
    assert sft(folder, 1, tmp_path / "out", *flags, stage=0) == [""]
    assert [entry["step"] for entry in evaluations_of(tmp_path / "out")] == [0, 2, 4, 6]
    assert len(log_of(tmp_path / "out")) == 6
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert sft(folder, 1, tmp_path / "out", *flags, "--resume_from_checkpoint", "latest", stage=0) == [""]
    assert len(log_of(tmp_path / "out")) == 6, "a run that gave up does not go on when it is started again"


LORA = ("--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--lora_dropout", "0")


@pytest.mark.parametrize(
    ("stage", "flags"), [slow(3, ("--bf16", "true")), (3, LORA), slow(0, ()), slow(1, ())], ids=str
)
def test_the_best_model_is_the_one_that_is_saved(
    folder: Path, tmp_path: Path, stage: int, flags: tuple[str, ...]
) -> None:
    """Steps far too large: what was best is soon lost. It is stopped, and goes on, before its end."""
    flags = (
        *flags, *EVALUATE, "--eval_dataset", str(folder / "eval.jsonl"), "--max_steps", "8", "--learning_rate", "0.3",
        "--save_steps", "2", "--save_total_limit", "1", "--load_best_model_at_end",
    )  # fmt: skip
    assert sft(folder, 2, tmp_path / "out", *flags, stage=stage, fault=Fault("term", 7)) == ["", ""]
    flags += ("--resume_from_checkpoint", "latest")
    assert sft(folder, 2, tmp_path / "out", *flags, stage=stage) == ["", ""]
    losses = {entry["step"]: entry["eval_loss"] for entry in evaluations_of(tmp_path / "out") if entry["step"]}
    best = min(losses, key=lambda step: losses[step])
    assert best < 6
    assert losses[8] > 1.02 * losses[best]
    kept = {path.name for path in (tmp_path / "out").glob("checkpoint-*")}
    assert kept == {f"checkpoint-{best}", "checkpoint-8"}
    loss, _ = loss_of_one_process(folder, tmp_path / "out")
    assert loss == pytest.approx(losses[best], rel=5e-3 if "--bf16" in flags else 1e-5)
    (weights,) = (tmp_path / "out").glob("*model.safetensors")
    assert {w.dtype for w in load_file(weights).values()} == {torch.bfloat16 if "--bf16" in flags else torch.float32}


@pytest.mark.slow
def test_the_last_model_is_saved_where_it_is_the_best(folder: Path, tmp_path: Path) -> None:
    flags = (*EVALUATE, "--eval_dataset", str(folder / "eval.jsonl"), "--max_steps", "7", "--save_steps", "2")
    assert sft(folder, 2, tmp_path / "out", *flags, "--load_best_model_at_end") == ["", ""]
    found = evaluations_of(tmp_path / "out")
    assert found[-1]["eval_loss"] < found[-2]["eval_loss"]
    loss, _ = loss_of_one_process(folder, tmp_path / "out")
    assert loss == pytest.approx(found[-1]["eval_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_best_checkpoint_that_is_gone_is_told_before_training(folder: Path, tmp_path: Path) -> None:
    """Resumed into another folder."""
    flags: tuple[str, ...] = EVALUATE
    flags += ("--eval_dataset", str(folder / "eval.jsonl"), "--load_best_model_at_end", "--save_steps", "2")
    assert sft(folder, 2, tmp_path / "out", *flags, "--max_steps", "2") == ["", ""]
    flags += ("--max_steps", "4", "--resume_from_checkpoint", str(tmp_path / "out" / "checkpoint-2"))
    for said in sft(folder, 2, tmp_path / "other", *flags):
        assert f"evaluation is that of {tmp_path}/other/checkpoint-2, whose model cannot be saved at the end" in said
    assert not (tmp_path / "other").exists()
