"""The page of a run holds its numbers and plots, and asks no network for anything."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
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


BROWSER = """
import json, sys
from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

app = QApplication([sys.argv[0], "--no-sandbox", "--disable-gpu"])
view = QWebEngineView()
view.resize(1200, 900)
ASK = (
    "[[...document.querySelectorAll('svg')].map(x => x.getBoundingClientRect().width),"
    "document.querySelectorAll('td').length, performance.getEntriesByType('resource').length]"
)
def answered(found):
    print(json.dumps(found))
    app.quit()
view.loadFinished.connect(lambda ok: view.page().runJavaScript(ASK, answered))
view.load(QUrl.fromLocalFile(sys.argv[1]))
view.show()
QTimer.singleShot(30000, app.quit)
app.exec()
"""


def test_a_browser_shows_it(tmp_path: Path) -> None:
    """Chromium, as Qt ships it: every plot has a width, and nothing was fetched."""
    pytest.importorskip(
        "PyQt6.QtWebEngineWidgets", reason="no browser: pip install -e .[browser]", exc_type=ImportError
    )
    page = tmp_path / "page.html"
    main(["report", str(run(tmp_path / "a", 5, True)), str(run(tmp_path / "b", 5, False)), "--out", str(page)])
    environment = os.environ | {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_DISABLE_SANDBOX": "1"}
    command = [sys.executable, "-c", BROWSER, str(page)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment, check=False)
    widths, num_cells, num_fetched = json.loads(ended.stdout)
    assert len(widths) == 6
    assert min(widths) > 300
    assert (num_cells, num_fetched) == (14, 0)


@pytest.mark.parametrize(("log", "message"), [(None, "has no train_log.jsonl"), ("", "has no optimizer step yet")])
def test_folders_without_a_run(tmp_path: Path, log: str | None, message: str) -> None:
    if log is not None:
        (tmp_path / "train_log.jsonl").write_text(log)
    with pytest.raises(SystemExit, match=message):
        main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert not (tmp_path / "page.html").exists()
