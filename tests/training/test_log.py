"""What a run says of itself, in its own file and through DeepSpeed's monitor."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from ds_ulysses.data.cost import cost_of
from ds_ulysses.training.watching.device import peak_flops
from tests.training.trainer import inputs, log_of, sft


def test_utilisation_is_of_the_peak_of_a_known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_flops() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, flops in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("Some GPU", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert peak_flops() == flops


def test_log_and_monitor_say_the_same(tmp_path: Path) -> None:
    folder = inputs(tmp_path)
    config = json.loads((folder / "zero2.json").read_text())
    config["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "run"}
    (folder / "zero2.json").write_text(json.dumps(config))
    flags = ("--max_steps", "3", "--per_device_train_batch_size", "4", "--padding_free")
    assert sft(folder, 2, tmp_path / "out", *flags, stage=2) == ["", ""]
    log = log_of(tmp_path / "out")
    cost = cost_of(AutoConfig.from_pretrained(folder / "model"))
    for entry in log:
        assert entry["tokens_per_second_per_device"] == pytest.approx(entry["tokens_per_second"] / 2)
        per_token = entry["tflops_per_device"] * 1e12 / entry["tokens_per_second_per_device"]
        assert cost.linear < per_token < cost.linear + cost.quadratic * 60
        assert 0.1 < entry["peak_memory_gib"] < 24
        assert "mfu" not in entry, "nothing is known of this CPU's peak"
        assert 0 <= entry["padding"] < 0.02
        seconds = entry["num_tokens"] / entry["step"] / entry["tokens_per_second"]
        assert 0 < entry["exchange_seconds"] < 3 * seconds
        assert entry["sent_gib"] > 0
    for key in ("loss", "learning_rate", "grad_norm", "tokens_per_second", "num_tokens", "exchange_seconds"):
        (file,) = (tmp_path / "csv" / "run").glob(f"train_{key}.csv")
        rows = list(csv.reader(file.open()))[1:]
        assert [int(step) for step, _ in rows] == [entry["step"] for entry in log]
        assert [float(value) for _, value in rows] == pytest.approx([entry[key] for entry in log]), key


def test_tensorboard_has_every_value(tmp_path: Path) -> None:
    """By its own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = inputs(tmp_path)
    assert sft(folder, 2, tmp_path / "out", "--max_steps", "3", "--report_to", "tensorboard", stage=2) == ["", ""]
    log = log_of(tmp_path / "out")
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    for key in log[0].keys() - {"step"}:
        found = [(event.step, event.value) for event in events.Scalars(f"train/{key}")]
        assert found == [(entry["step"], pytest.approx(entry[key])) for entry in log], key
