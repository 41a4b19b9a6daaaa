"""The page of a run holds its numbers and plots, and asks no network for anything."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from selenium import webdriver

from ds_ulysses.commands.main import main


def run(folder: Path, num_steps: int, evaluated: bool, spikes: int = 0) -> Path:
    folder.mkdir()
    steps: list[dict[str, object]] = [
        {"step": i, "loss": 3 - 0.1 * i, "learning_rate": 0.1, "grad_norm": 1.0, "tokens_per_second": 100.0 + i,
         "tokens_per_second_per_device": 50.0 + i, "num_tokens": 1000 * i, "padding": 0.1, "imbalance": 1.2}
        for i in range(1, num_steps + 1)
    ]  # fmt: skip
    lines = [*steps, {"step": num_steps, "eval_loss": 2.25}] if evaluated else steps
    found = [{"loss": 9.0, "samples": [4, 7]}, {"loss": 5.0, "samples": [31]}]
    spike = {"spike_loss": 7.0, "spike_usual_loss": 2.5, "spike_deviations": 6.04, "spike_in": found}
    lines += [{"step": 3} | spike] * spikes
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
    assert "stand out" not in page
    fetched = re.findall(r"""(?:src|href)\s*=\s*["'](?!#)([^"']*)|url\((?!#)([^)]*)\)|@import|<script""", page)
    assert fetched == []


def test_losses_that_stand_out_are_listed_with_their_samples(tmp_path: Path) -> None:
    main(["report", str(run(tmp_path / "a", 5, False, spikes=1)), "--out", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    cells = ("3", "7.0000", "2.5000", "6.0", "9.0000: 4, 7; 5.0000: 31")
    assert "".join(f"<td>{cell}</td>" for cell in cells) in page


def test_steps_left_out_are_listed_and_leave_a_gap_in_the_plots(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", 3, False)
    steps = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    steps[2] |= {"loss": None, "grad_norm": None}
    left_out = {"step": 3, "left_out": [{"loss": 2.5, "samples": [8]}, {"loss": None, "samples": [1, 2]}]}
    (folder / "train_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*steps, left_out]))
    main(["report", str(folder), "--out", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert "<td>3</td><td>2.5000: 8; not finite: 1, 2</td>" in page
    assert "<td>2.9000</td><td>not finite</td>" in page


MEASURED = """return [
    [...document.querySelectorAll("svg")].map(x => x.getBoundingClientRect().width),
    document.querySelectorAll("td").length,
    performance.getEntriesByType("resource").length,
]"""


def test_a_browser_shows_it(tmp_path: Path) -> None:
    """Chromium without a network: every plot has a width, and nothing is fetched."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no browser: it needs Debian's packages chromium and chromium-driver")
    page = tmp_path / "page.html"
    runs = [run(tmp_path / "a", 5, True, spikes=1), run(tmp_path / "b", 5, False)]
    main(["report", *map(str, runs), "--out", str(page)])
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-background-networking", "window-size=1200,900"):
        options.add_argument(f"--{flag}")
    with webdriver.Chrome(options, webdriver.ChromeService(driver)) as chromium:
        chromium.set_network_conditions(offline=True, latency=0, throughput=0)
        chromium.get(page.as_uri())
        widths, num_cells, num_fetched = chromium.execute_script(MEASURED)
        assert chromium.get_screenshot_as_file(str(tmp_path / "page.png"))
        assert [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert len(widths) == 6
    assert min(widths) > 300
    assert (num_cells, num_fetched) == (2 * 7 + 6, 0)


@pytest.mark.parametrize(("log", "message"), [(None, "has no train_log.jsonl"), ("", "has no optimizer step yet")])
def test_folders_without_a_run(tmp_path: Path, log: str | None, message: str) -> None:
    if log is not None:
        (tmp_path / "train_log.jsonl").write_text(log)
    with pytest.raises(SystemExit, match=message):
        main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert not (tmp_path / "page.html").exists()
