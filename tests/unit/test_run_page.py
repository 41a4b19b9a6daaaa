"""The page of a run holds its numbers and plots, and asks no network for anything."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ds_ulysses.cli import main


def run(folder: Path, num_steps: int, evaluated: bool) -> Path:
    folder.mkdir()
    steps = [
        {"step": i, "loss": 3 - 0.1 * i, "learning_rate": 0.1, "grad_norm": 1.0, "tokens_per_second": 100.0 + i,
         "tokens_per_second_per_device": 50.0 + i, "num_tokens": 1000 * i, "padding": 0.1, "imbalance": 1.2}
        for i in range(1, num_steps + 1)
    ]  # fmt: skip
    lines = [*steps, {"step": num_steps, "eval_loss": 2.25}] if evaluated else steps
    (folder / "train_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    first, second = run(tmp_path / "first & best", 12, True), run(tmp_path / "second", 1, False)
    main(["report", str(first), str(second), "--out", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    for cell in ("12", "2.9000", "1.8000", "2.2500", "12,000", "107"):
        assert f"<td>{cell}</td>" in page
    assert "first &amp; best" in page
    plots = re.findall(r"<h3>(.*?)</h3>(<svg.*?</svg>)", page, flags=re.DOTALL)
    assert [title for title, _ in plots] == [
        "loss", "learning rate", "norm of the gradient", "tokens per second and device",
        "padding, share of computed tokens", "busiest replica / mean",
    ]  # fmt: skip
    for _, svg in plots:
        ET.fromstring(svg)
    fetched = re.findall(r"""(?:src|href)\s*=\s*["'](?!#)([^"']*)|url\((?!#)([^)]*)\)|@import|<script""", page)
    assert fetched == []


@pytest.mark.parametrize(("log", "message"), [(None, "has no train_log.jsonl"), ("", "has no optimizer step yet")])
def test_folders_without_a_run(tmp_path: Path, log: str | None, message: str) -> None:
    if log is not None:
        (tmp_path / "train_log.jsonl").write_text(log)
    with pytest.raises(SystemExit, match=message):
        main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert not (tmp_path / "page.html").exists()
