"""Gradients that are no numbers, ranks that hang, schedulers that want the machine back."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.quick import slow
from tests.training.trainer import Fault, ids_of, inputs, killed, log_of, sft

POISON = "eight"
"""A word whose embedding is not a number."""


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 12 samples some hold the poison."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    folder = inputs(tmp_path_factory.mktemp("poisoned"))
    weights = load_file(folder / "model" / "model.safetensors")
    token = AutoTokenizer.from_pretrained(folder / "model").convert_tokens_to_ids(POISON)
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    return folder


def poisoned_ids(folder: Path) -> set[int]:
    lines = (folder / "data.jsonl").read_text().splitlines()
    return {i for i, line in enumerate(lines) if POISON in line.split("assistant")[0] or POISON in line}


@pytest.mark.parametrize("stage", [slow(0), slow(1), slow(2), 3])
def test_a_step_that_is_not_finite_stops_the_run_with_its_samples(poisoned: Path, tmp_path: Path, stage: int) -> None:
    said = sft(poisoned, 2, tmp_path / "out", "--save_steps", "1", stage=stage)
    bad = poisoned_ids(poisoned)
    assert 0 < len(bad) < 12
    done = len(log_of(tmp_path / "out"))
    for message in said:
        found = re.search(
            r"The gradient of step (\d+) is not finite. Its rows of the data, from 0 on: \[(\d+)\]", message
        )
        assert found, message
        assert int(found[1]) == done + 1
        assert int(found[2]) in bad
    assert not bad & {i for ids in ids_of(tmp_path / "out").values() for i in ids}
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == done


@pytest.mark.parametrize("stage", [slow(0), slow(1), 2, slow(3)])
def test_steps_that_are_not_finite_can_be_skipped(poisoned: Path, tmp_path: Path, stage: int) -> None:
    """Every other weight stays a number."""
    from safetensors.torch import load_file

    assert sft(poisoned, 2, tmp_path / "out", "--skip_nonfinite_steps", stage=stage) == [""] * 2
    log = log_of(tmp_path / "out")
    assert len(log) == 12
    bad, left_out = poisoned_ids(poisoned), []
    for entry in log:
        (sample,) = ids_of(tmp_path / "out")[int(entry["step"])]
        assert (entry["loss"] is None) == (sample in bad)
        if sample in bad:
            left_out.append({"step": entry["step"], "left_out": [{"loss": None, "samples": [sample]}]})
    assert entries_with("left_out", tmp_path / "out") == left_out
    weights, before = (load_file(path / "model.safetensors") for path in (tmp_path / "out", poisoned / "model"))
    changed = 0
    for name, weight in weights.items():
        assert torch.equal(weight.isfinite(), before[name].isfinite()), name
        changed += not torch.equal(weight.nan_to_num(), before[name].nan_to_num())
    assert changed > 10


def test_sigterm_to_one_rank_ends_all_with_a_checkpoint(tmp_path: Path) -> None:
    folder = inputs(tmp_path)
    flags = ("--max_steps", "6", "--save_steps", "100")
    assert sft(folder, 2, tmp_path / "out", *flags, fault=Fault("term", 3)) == [""] * 2
    assert len(log_of(tmp_path / "out")) == 3
    assert (tmp_path / "out" / "checkpoint-3" / "manifest.json").exists()
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each kind, ended by its watchdog; both at a time, as all they do is wait."""
    folders = {kind: inputs(tmp_path_factory.mktemp("hung")) for kind in ("stuck", "no data")}

    def run(kind: str) -> None:
        folder = folders[kind]
        killed(folder, 2, folder / "out", "--step_timeout", "8", fault=Fault(kind, 2, rank=1))

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(run, folders)) == [None, None]
    return folders


@pytest.mark.slow
def test_a_step_that_hangs_shows_the_stack_of_every_rank_and_ends(hung: dict[str, Path]) -> None:
    folder = hung["stuck"]
    stacks = [(folder / f"stderr_{rank}").read_text() for rank in (0, 1)]
    assert all("Timeout (0:00:08)!" in stack for stack in stacks)
    assert "in train_step" in stacks[0], "rank 0 waits for the other one in its step"
    assert "in _go_wrong" in stacks[1]
    assert len(log_of(folder / "out")) == 1


@pytest.mark.slow
def test_a_rank_that_waits_for_its_data_for_ever_says_where(hung: dict[str, Path]) -> None:
    """It is the first to end: its last step was the earlier one."""
    folder = hung["no data"]
    stack = (folder / "stderr_1").read_text()
    assert "Timeout (0:00:08)!" in stack
    assert "in faulty_fetch" in stack
    assert "in ready_steps" in stack
    assert len(log_of(folder / "out")) == 1


@pytest.mark.slow
def test_a_loss_that_stands_out_is_reported_with_its_samples(tmp_path: Path) -> None:
    """One of 40 answers is another one; the run is killed after it, goes on, and still knows what is usual."""
    folder = inputs(tmp_path)
    chats = [answered("one two three") for _ in range(40)]
    (folder / "data.jsonl").write_text("".join(chats))
    flags = ("--gradient_accumulation_steps", "2", "--save_steps", "16", "--max_steps", "20")
    assert sft(folder, 2, tmp_path / "calm", *flags) == [""] * 2
    assert entries_with("spike_loss", tmp_path / "calm") == []
    odd = ids_of(tmp_path / "calm")[18][0]
    chats[odd] = answered("eight seven six")
    (folder / "data.jsonl").write_text("".join(chats))
    killed(folder, 2, tmp_path / "out", *flags, fault=Fault("killed", 20))
    (before,) = entries_with("spike_loss", tmp_path / "out")
    assert sft(folder, 2, tmp_path / "out", *flags, "--resume_from_checkpoint", "latest") == [""] * 2
    (spike,) = entries_with("spike_loss", tmp_path / "out")
    assert spike == before
    assert spike["step"] == 18
    assert spike["spike_loss"] == log_of(tmp_path / "out")[17]["loss"]
    by_loss = sorted(spike["spike_in"], key=lambda one: one["loss"])
    assert by_loss[1]["samples"] == [odd]
    assert by_loss[1]["loss"] > 2 * by_loss[0]["loss"]
    assert spike["spike_loss"] == pytest.approx((by_loss[0]["loss"] + by_loss[1]["loss"]) / 2)


def answered(text: str) -> str:
    chat = [{"role": "user", "content": "what"}, {"role": "assistant", "content": text}]
    return json.dumps({"messages": chat}) + "\n"


def entries_with(key: str, output: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (output / "train_log.jsonl").read_text().splitlines()]
    return [entry for entry in entries if key in entry]
