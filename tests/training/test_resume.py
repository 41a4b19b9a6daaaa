"""A run that stops and goes on is the run that never stopped, bit for bit."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.quick import slow_but
from tests.training.trainer import Fault, ids_of, inputs, killed, log_of, sft

EXACT = ("loss", "learning_rate", "grad_norm", "epoch", "num_tokens", "padding", "imbalance")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return inputs(tmp_path_factory.mktemp("resume"))


def assert_same_run(found: Path, right: Path, steps: int) -> None:
    """Logs, samples and final weights."""
    assert [entry["step"] for entry in log_of(found)] == list(range(1, steps + 1))
    for key in EXACT:
        assert [entry[key] for entry in log_of(found)] == [entry[key] for entry in log_of(right)], key
    assert ids_of(found) == ids_of(right)
    weights = next(path.name for path in right.glob("*model.safetensors"))
    assert (found / weights).read_bytes() == (right / weights).read_bytes()


WAYS: dict[str, tuple[int, int, list[str]]] = {
    "zero 0": (2, 0, []),
    "zero 1": (2, 1, ["--lr_scheduler_type", "cosine", "--warmup_steps", "2"]),
    "zero 2, two replicas, accumulated, into the second epoch": (
        4, 2, ["--sequence_parallel_size", "2", "--gradient_accumulation_steps", "2"],
    ),
    "zero 3, packed adapter with dropout": (
        2, 3, ["--packing", "--use_peft", "--lora_dropout", "0.3", "--lora_target_modules", "q_proj", "v_proj"],
    ),
    "zero 0, bf16": (2, 0, ["--bf16", "true"]),
    "zero 1, bf16": (2, 1, ["--bf16", "true", "--gradient_accumulation_steps", "2"]),
    "zero 3, bf16": (2, 3, ["--bf16", "true", "--gradient_accumulation_steps", "2"]),
    "zero 2, a stream": (2, 2, ["--streaming", "--per_device_train_batch_size", "3"]),
}  # fmt: skip


@pytest.mark.parametrize("way", slow_but({"zero 3, packed adapter with dropout"}, WAYS))
def test_resumed_is_unbroken(folder: Path, tmp_path: Path, way: str) -> None:
    ranks, stage, flags = WAYS[way]
    flags = [*flags, "--max_steps", "6", "--save_steps", "2"]
    assert sft(folder, ranks, tmp_path / "whole", *flags, stage=stage) == [""] * ranks
    killed(folder, ranks, tmp_path / "part", *flags, stage=stage, fault=Fault("killed", 6))
    assert [path.name for path in sorted((tmp_path / "part").glob("checkpoint-*"))] == ["checkpoint-2", "checkpoint-4"]
    flags += ["--resume_from_checkpoint", str(tmp_path / "part" / "checkpoint-4")]
    assert sft(folder, ranks, tmp_path / "part", *flags, stage=stage) == [""] * ranks
    assert_same_run(tmp_path / "part", tmp_path / "whole", 6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_is_stopped_ten_times(folder: Path, tmp_path: Path) -> None:
    """30 steps; ranks are killed, one or all, also while they save, or asked to stop; no sample comes twice."""
    flags = ["--max_steps", "30", "--save_steps", "2", "--save_total_limit", "2", "--lr_scheduler_type", "cosine"]
    assert sft(folder, 2, tmp_path / "whole", *flags) == [""] * 2
    drawn, again = random.Random(1), ["--resume_from_checkpoint", "latest"]
    for kind in ("killed", "saving", "term", "all killed", "saving", "killed", "term", "saving", "all killed", "term"):
        fault = Fault(kind, drawn.randint(2, 4), drawn.randint(0, 1))
        if kind == "term":
            assert sft(folder, 2, tmp_path / "part", *flags, *again, fault=fault) == [""] * 2
            assert not (tmp_path / "part" / "model.safetensors").exists()
        else:
            killed(folder, 2, tmp_path / "part", *flags, *again, fault=fault)
        steps = [int(path.name.split("-")[1]) for path in (tmp_path / "part").glob("checkpoint-*")]
        assert len(steps) <= 2
        assert max(steps, default=0) < 30, "the run was over before it was stopped"
    assert sft(folder, 2, tmp_path / "part", *flags, *again) == [""] * 2
    assert_same_run(tmp_path / "part", tmp_path / "whole", 30)
    assert not list((tmp_path / "part").glob(".*"))


ELSEWHERE: list[tuple[int, int, int, list[str]]] = [
    (3, 4, 3, ["--sequence_parallel_size", "4"]),
    (3, 1, 3, []),
    (3, 2, 3, ["--sequence_parallel_size", "1", "--gradient_accumulation_steps", "1"]),
    (3, 4, 1, ["--sequence_parallel_size", "2", "--gradient_accumulation_steps", "1"]),
    (3, 2, 2, []),
    (2, 4, 2, ["--sequence_parallel_size", "4"]),
    (2, 2, 3, []),
    (1, 1, 1, []),
    (1, 4, 2, ["--sequence_parallel_size", "2", "--gradient_accumulation_steps", "1"]),
    (0, 4, 0, ["--sequence_parallel_size", "4"]),
]
"""ZeRO stage of the checkpoint, on 2 ranks that share a sequence; then ranks, stage and flags that go on with it."""


@pytest.fixture(scope="module")
def unbroken(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """6 steps at each ZeRO stage, with checkpoints. Weight decay is for matrices only, which conversion may forget."""
    root = tmp_path_factory.mktemp("unbroken")
    for stage in range(4):
        flags = [*CONTINUED, "--gradient_accumulation_steps", "2"]
        assert sft(folder, 2, root / str(stage), *flags, stage=stage) == [""] * 2
    return {stage: root / str(stage) for stage in range(4)}


CONTINUED = ["--max_steps", "6", "--save_steps", "3", "--weight_decay", "0.5", "--lr_scheduler_type", "cosine"]


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "ranks", "stage", "flags"), ELSEWHERE, ids=str)
def test_resume_elsewhere(
    folder: Path, tmp_path: Path, unbroken: dict[int, Path], saved: int, ranks: int, stage: int, flags: list[str]
) -> None:
    """On other ranks or at another ZeRO stage the next losses are the same, to rounding."""
    whole = unbroken[saved]
    checkpoint = shutil.copytree(whole / "checkpoint-3", tmp_path / "checkpoint-3")
    files = {path: path.stat().st_size for path in checkpoint.rglob("*")}
    flags = ["--gradient_accumulation_steps", "2", *flags, *CONTINUED, "--resume_from_checkpoint", str(checkpoint)]
    assert sft(folder, ranks, tmp_path / "out", *flags, stage=stage) == [""] * ranks
    found, right = log_of(tmp_path / "out"), log_of(whole)[3:]
    assert [entry["step"] for entry in found] == [4, 5, 6]
    for key in ("loss", "grad_norm", "learning_rate", "num_tokens"):
        assert [entry[key] for entry in found] == pytest.approx([entry[key] for entry in right], rel=1e-5), key
    assert {step: ids for step, ids in ids_of(whole).items() if step > 3} == ids_of(tmp_path / "out")
    assert {path: path.stat().st_size for path in checkpoint.rglob("*")} == files, "what it was converted to is gone"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ulysses", "ring", "all_gather"])
def test_resume_with_another_strategy(folder: Path, tmp_path: Path, unbroken: dict[int, Path], strategy: str) -> None:
    config = json.loads((folder / "zero3.json").read_text()) | {"ds_ulysses": {"strategy": strategy}}
    (tmp_path / "other.json").write_text(json.dumps(config))
    flags = [*CONTINUED, "--gradient_accumulation_steps", "2", "--deepspeed", str(tmp_path / "other.json")]
    flags += ["--resume_from_checkpoint", str(unbroken[3] / "checkpoint-3")]
    assert sft(folder, 2, tmp_path / "out", *flags) == [""] * 2
    assert f"strategy  {strategy}" in (folder / "said").read_text()
    for key in ("loss", "grad_norm", "learning_rate"):
        found, right = ([entry[key] for entry in log_of(run)[-3:]] for run in (tmp_path / "out", unbroken[3]))
        assert found == pytest.approx(right, rel=1e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_of_a_run_may_become_ranks_of_a_sequence_or_one(folder: Path, tmp_path: Path, stage: int) -> None:
    """Pairs on 4 ranks: all four share a sequence, or one rank does it all; and back to pairs."""
    pairs, four, one = (4, "2", "1"), (4, "4", "2"), (1, "1", "2")
    right = None
    for ranks, sp_size, accumulation in (pairs, four, one, pairs):
        flags = [*CONTINUED, "--sequence_parallel_size", sp_size, "--gradient_accumulation_steps", accumulation]
        output = tmp_path / f"{ranks} {sp_size}"
        if right is not None:
            flags += ["--resume_from_checkpoint", str(right / "checkpoint-3")]
        assert sft(folder, ranks, output, *flags, stage=stage) == [""] * ranks
        right = right or output
        for key in ("loss", "grad_norm", "learning_rate", "num_tokens"):
            found, expected = ([entry[key] for entry in log_of(run)[-3:]] for run in (output, right))
            assert found == pytest.approx(expected, rel=1e-5), (key, output)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "stage"), [(3, 2), (2, 3)])
def test_resume_of_bf16_training_at_another_stage(folder: Path, tmp_path: Path, saved: int, stage: int) -> None:
    flags = [*CONTINUED, "--bf16", "true", "--gradient_accumulation_steps", "2"]
    assert sft(folder, 2, tmp_path / "whole", *flags, stage=saved) == [""] * 2
    flags += ["--resume_from_checkpoint", str(tmp_path / "whole" / "checkpoint-3")]
    assert sft(folder, 2, tmp_path / "out", *flags, stage=stage) == [""] * 2
    found, right = log_of(tmp_path / "out"), log_of(tmp_path / "whole")[3:]
    for key in ("loss", "grad_norm", "learning_rate"):
        assert [entry[key] for entry in found] == pytest.approx([entry[key] for entry in right], rel=1e-5), key


def damage(checkpoint: Path, how: str) -> None:
    shard = next(checkpoint.glob("state/*rank_1*optim*"))
    if how == "missing":
        shard.unlink()
    elif how == "truncated":
        with shard.open("r+b") as file:
            file.truncate(100)
    elif how == "unfinished":
        (checkpoint / "manifest.json").unlink()
    else:
        (checkpoint / "manifest.json").write_text('{"state')


REFUSED: list[tuple[str, list[str], str]] = [
    ("missing", [], r"optim_states.pt is missing. Whole ones are: .*checkpoint-3\."),
    ("truncated", [], r"optim_states.pt has 100 bytes instead of [\d,]+\. Whole ones are: .*checkpoint-3\."),
    ("unfinished", [], r"it has no manifest.json, which is written last. Whole ones are: .*checkpoint-3\."),
    ("cut manifest", [], r"its manifest.json is cut off. Whole ones are: .*checkpoint-3\."),
    ("", ["--seed", "7"], "is of a run with seed 42, now 7: samples would be left out or repeated"),
    ("", ["--gradient_accumulation_steps", "3"], "samples or packs per step 2, now 3"),
    ("", ["--use_peft"], "lora_r None, now 16"),
    ("", ["--resume_from_checkpoint", "nowhere"], "checkpoint nowhere cannot be resumed from: .*There is no other one"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "flags", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_a_checkpoint_that_does_not_fit_is_refused_before_training(
    folder: Path, tmp_path: Path, unbroken: dict[int, Path], how: str, flags: list[str], message: str
) -> None:
    shutil.copytree(unbroken[2], tmp_path / "out")
    if how:
        damage(tmp_path / "out" / "checkpoint-6", how)
    before = sorted(tmp_path.rglob("*"))
    flags = ["--gradient_accumulation_steps", "2", *CONTINUED, "--resume_from_checkpoint", "latest", *flags]
    for said in sft(folder, 2, tmp_path / "out", *flags, stage=2):
        assert re.search(message, said), said
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_between_zero_0_and_others_nothing_can_be_converted(
    folder: Path, tmp_path: Path, unbroken: dict[int, Path]
) -> None:
    flags: list[Any] = ["--gradient_accumulation_steps", "2", *CONTINUED, "--resume_from_checkpoint"]
    (said, _) = sft(folder, 2, tmp_path / "out", *flags, str(unbroken[0] / "checkpoint-3"), stage=2)
    assert "is of ZeRO stage 0, this run of 2: DeepSpeed converts between 1, 2 and 3 only" in said


@pytest.mark.slow
def test_latest_of_a_run_that_has_no_checkpoint_yet_is_a_new_run(folder: Path, tmp_path: Path) -> None:
    flags = ["--max_steps", "2", "--save_strategy", "no"]
    killed(folder, 2, tmp_path / "part", *flags, fault=Fault("killed", 2))
    assert sft(folder, 2, tmp_path / "part", *flags, "--resume_from_checkpoint", "latest") == [""] * 2
    assert sft(folder, 2, tmp_path / "whole", *flags) == [""] * 2
    assert_same_run(tmp_path / "part", tmp_path / "whole", 2)


def test_checkpoints_of_another_run_are_neither_mixed_nor_lost(folder: Path, tmp_path: Path) -> None:
    flags = ["--max_steps", "2", "--save_steps", "1"]
    assert sft(folder, 1, tmp_path, *flags) == [""]
    before = sorted(tmp_path.rglob("*"))
    (said,) = sft(folder, 1, tmp_path, *flags, "--overwrite_output_dir")
    assert "holds checkpoint-2 of another run. Go on with --resume_from_checkpoint latest" in said
    assert sorted(tmp_path.rglob("*")) == before
    flags = ["--max_steps", "2", "--save_steps", "2", "--save_total_limit", "1"]
    flags += ["--resume_from_checkpoint", str(tmp_path / "checkpoint-1")]
    assert sft(folder, 1, tmp_path, *flags) == [""]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"], "the last one written stays"


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoints_before(folder: Path, tmp_path: Path) -> None:
    flags = ["--max_steps", "4", "--save_steps", "1"]
    (said,) = sft(folder, 1, tmp_path / "part", *flags, fault=Fault("full", 3))
    assert re.search(r"checkpoint-3 could not be written: .*Those before it are as they were; make room", said, re.S)
    assert [path.name for path in sorted((tmp_path / "part").glob("checkpoint-*"))] == ["checkpoint-1", "checkpoint-2"]
    assert sft(folder, 1, tmp_path / "part", *flags, "--resume_from_checkpoint", "latest") == [""]
    assert sft(folder, 1, tmp_path / "whole", *flags) == [""]
    assert_same_run(tmp_path / "part", tmp_path / "whole", 4)
