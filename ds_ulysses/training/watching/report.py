"""`ds-ulysses report`: the logs of one run, or of several side by side, as one HTML page that needs no network."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
LOG = "train_log.jsonl"
PLOTS = {
    "loss": ("loss", "eval_loss", "spike_loss"),
    "learning rate": ("learning_rate",),
    "norm of the gradient": ("grad_norm",),
    "tokens per second and device": ("tokens_per_second_per_device",),
    "model TFLOPS per device": ("tflops_per_device",),
    "peak memory of rank 0, GiB": ("peak_memory_gib",),
    "seconds that rank 0 waited for exchanges": ("exchange_seconds",),
    "padding, share of computed tokens": ("padding",),
    "busiest replica / mean": ("imbalance",),
}
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font-family: sans-serif; margin: 2em auto; padding: 0 2em; max-width: 75em; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: 0.2em 1em; text-align: right; border-bottom: 1px solid #ccc; }}
td:first-child, th:first-child {{ text-align: left; }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(30em, 1fr)); }}
svg {{ width: 100%; height: auto; }}
</style></head><body><h1>{title}</h1>
{summary}<div class="plots">{plots}</div>{notices}</body></html>
"""
SUMMARY = ("steps", "loss, first", "loss, last", "eval_loss, best", "tokens", "tokens/s, median")
SAMPLES = "loss: samples, of each micro-batch"
SPIKES = ("step", "loss", "usual loss", "deviations", SAMPLES)
LEFT_OUT = ("step", SAMPLES)


def write_report(folders: Sequence[Path], target: Path) -> None:
    """Write the report. Raises `ValueError` for a folder without a log, a log without a step, or without matplotlib."""
    runs = {str(folder): _read(folder) for folder in folders}
    plots = "".join(
        f"<div><h3>{title}</h3>{_plot(keys, runs)}</div>"
        for title, keys in PLOTS.items()
        if any(key in entry for entries in runs.values() for entry in entries for key in keys)
    )
    summary = _table(SUMMARY, [(name, *_summary(entries)) for name, entries in runs.items()])
    every = [(name, entry) for name, entries in runs.items() for entry in entries]
    spikes = [(name, *_spike(entry)) for name, entry in every if "spike_in" in entry]
    left_out = [(name, *_left_out(entry)) for name, entry in every if "left_out" in entry]
    notices = _notices("losses that stand out", SPIKES, spikes)
    notices += _notices("steps left out, whose gradient is not finite", LEFT_OUT, left_out)
    title = html.escape(", ".join(runs))
    target.write_text(PAGE.format(title=title, summary=summary, plots=plots, notices=notices), encoding="utf-8")


def _read(folder: Path) -> list[Entry]:
    file = folder / LOG
    if not file.is_file():
        raise ValueError(f"{folder} has no {LOG}. Give the output folder of a run.")
    entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if not any("loss" in entry for entry in entries):
        raise ValueError(f"{file} has no optimizer step yet.")
    return entries


def _notices(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"<h3>{title}</h3>{_table(head, rows)}" if rows else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column names the run."""
    return f"<table>{_line('th', ('run', *head))}{''.join(_line('td', row) for row in rows)}</table>"


def _line(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _summary(entries: list[Entry]) -> tuple[str, ...]:
    steps = [entry for entry in entries if "loss" in entry]
    evaluated = [entry["eval_loss"] for entry in entries if "eval_loss" in entry]
    rates = sorted(entry["tokens_per_second"] for entry in steps)
    return (
        f"{steps[-1]['step']:,.0f}",
        _loss(steps[0]["loss"]),
        _loss(steps[-1]["loss"]),
        f"{min(evaluated):.4f}" if evaluated else "",
        f"{steps[-1]['num_tokens']:,.0f}",
        f"{rates[len(rates) // 2]:,.0f}",
    )


def _spike(entry: Entry) -> tuple[str, ...]:
    return (
        f"{entry['step']:,}",
        f"{entry['spike_loss']:.4f}",
        f"{entry['spike_usual_loss']:.4f}",
        f"{entry['spike_deviations']:.1f}",
        _samples(entry["spike_in"]),
    )


def _left_out(entry: Entry) -> tuple[str, ...]:
    return f"{entry['step']:,}", _samples(entry["left_out"])


def _samples(micro_batches: list[Entry]) -> str:
    return "; ".join(f"{_loss(one['loss'])}: {', '.join(map(str, one['samples']))}" for one in micro_batches)


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def _plot(keys: tuple[str, ...], runs: dict[str, list[Entry]]) -> str:
    """One SVG over the steps; a line for each run and key."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("Plots need matplotlib, which is not installed: pip install matplotlib.") from error
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="step")
    for name, entries in runs.items():
        for key in keys:
            points = [(entry["step"], entry[key]) for entry in entries if entry.get(key) is not None]
            if points:
                marker = "o" if len(points) < 2 or key.startswith(("eval", "spike")) else ""
                line = "" if key.startswith("spike") else "-"
                axes.plot(
                    *zip(*points, strict=True),
                    label=name if key == keys[0] else f"{name} {key}",
                    marker=marker,
                    linestyle=line,
                )
    axes.legend(fontsize="x-small")
    axes.grid(alpha=0.3)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
