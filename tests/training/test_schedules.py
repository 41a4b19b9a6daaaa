"""Steps and learning rates depend on replicas, never on the ranks that share a sequence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quick import slow_but
from tests.training.trainer import ids_of, inputs, log_of, sft


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return inputs(tmp_path_factory.mktemp("schedules"), num_samples=8)


def test_steps_and_learning_rates_go_by_replicas(folder: Path, tmp_path: Path) -> None:
    """8 samples, accumulation 2, one epoch, linear with a step of warm-up: 4 ranks in pairs do what 2 alone do."""
    flags = ("--gradient_accumulation_steps", "2", "--warmup_steps", "1", "--num_train_epochs", "1")
    for ranks, sp_size in ((4, 2), (2, 1)):
        output = tmp_path / str(ranks)
        assert sft(folder, ranks, output, *flags, "--sequence_parallel_size", str(sp_size)) == [""] * ranks
    four, two = (log_of(tmp_path / str(ranks)) for ranks in (4, 2))
    assert [entry["learning_rate"] for entry in four] == [entry["learning_rate"] for entry in two] == [0.0, 1e-2]
    assert [entry["epoch"] for entry in four] == [0.5, 1.0]
    assert [entry["loss"] for entry in four] == pytest.approx([entry["loss"] for entry in two], rel=1e-5)
    assert ids_of(tmp_path / "4") == ids_of(tmp_path / "2")


SCHEDULES = slow_but({"cosine"}, ["linear", "cosine", "constant", "constant_with_warmup", "polynomial"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_are_those_of_transformers(folder: Path, tmp_path: Path, schedule: str) -> None:
    import torch
    from transformers import get_scheduler

    flags = ("--max_steps", "5", "--warmup_steps", "2", "--lr_scheduler_type", schedule)
    assert sft(folder, 1, tmp_path / "out", *flags, stage=0) == [""]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    right = get_scheduler(schedule, optimizer, num_warmup_steps=2, num_training_steps=5)
    rates = []
    for _ in range(5):
        rates.append(right.get_last_lr()[0])
        optimizer.step()
        right.step()
    assert [entry["learning_rate"] for entry in log_of(tmp_path / "out")] == rates


def test_the_last_step_of_an_epoch_takes_what_is_left(folder: Path, tmp_path: Path) -> None:
    """8 samples by 3, two epochs: 3 + 3 + 2, twice; nothing is repeated, dropped or moved into the next epoch."""
    flags = ("--per_device_train_batch_size", "3", "--num_train_epochs", "2")
    assert sft(folder, 1, tmp_path / "out", *flags, stage=2) == [""]
    ids = list(ids_of(tmp_path / "out").values())
    assert [len(step) for step in ids] == [3, 3, 2, 3, 3, 2]
    for epoch in (ids[:3], ids[3:]):
        assert sorted(id for step in epoch for id in step) == list(range(8))
    assert [entry["epoch"] for entry in log_of(tmp_path / "out")] == [3 / 8, 6 / 8, 1.0, 1 + 3 / 8, 1 + 6 / 8, 2.0]
