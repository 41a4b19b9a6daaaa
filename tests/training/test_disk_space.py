"""A run that would end with a full disk does not begin."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.trainer import inputs, log_of, sft


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return inputs(tmp_path_factory.mktemp("room"))


SIZE = 2_000_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a disk of its own size needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_disk_that_will_be_full_is_told_before_training(folder: Path, small_disk: Path, stage: int) -> None:
    """Three checkpoints fit, as a run shows, and what is asked for is no more than they take; ten do not."""
    flags = ("--max_steps", "10", "--save_steps")
    found = None
    for said in sft(folder, 2, small_disk / "out", *flags, "1", stage=stage):
        found = re.search(r"has (\S+) GiB left, but this run needs at least \S+: 10 checkpoints of (\S+), and", said)
        assert found, said
        assert float(found[1]) * 2**30 == pytest.approx(SIZE, rel=0.01)
    assert found
    assert list(small_disk.iterdir()) == []
    assert sft(folder, 2, small_disk / "out", *flags, "5", stage=stage) == ["", ""]
    assert len(log_of(small_disk / "out")) == 10
    (state,) = (small_disk / "out").glob("checkpoint-5/state")
    taken = sum(path.stat().st_size for path in state.iterdir())
    assert 0.7 * taken < float(found[2]) * 2**30 < taken


def number(folder: Path, output: Path, flags: tuple[str, ...]) -> int:
    """Of the checkpoints that a run on a disk without any room says it needs."""
    (said,) = sft(folder, 1, output, *flags)
    found = re.search(r"(\d+) checkpoints", said)
    assert said == "" or found, said
    return int(found[1]) if found else 0


EVALUATED = ("--eval_strategy", "steps", "--eval_steps", "2", "--eval_dataset", "data.jsonl")
COUNTED: list[tuple[tuple[str, ...], int]] = [
    (("--save_steps", "3"), 4),
    (("--save_steps", "3", "--save_total_limit", "2"), 3),
    (("--save_steps", "2", "--save_total_limit", "2", "--load_best_model_at_end", *EVALUATED), 4),
    (("--save_steps", "6", "--save_total_limit", "5"), 2),
    (("--save_strategy", "epoch", "--num_train_epochs", "3"), 3),
    (("--save_strategy", "no"), 0),
]


@pytest.mark.parametrize(("flags", "right"), COUNTED, ids=str)
def test_as_many_checkpoints_are_counted_as_will_be_there_at_once(
    folder: Path, small_disk: Path, flags: tuple[str, ...], right: int
) -> None:
    flags = tuple(str(folder / flag) if flag == "data.jsonl" else flag for flag in flags)
    (small_disk / "filled").write_bytes(bytes(SIZE - 8192))
    assert number(folder, small_disk / "out", flags) == right
