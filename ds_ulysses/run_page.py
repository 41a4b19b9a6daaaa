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
{summary}<div class="plots">{plots}</div>{spikes}</body></html>
"""
SUMMARY = ("steps", "loss, first", "loss, last", "eval_loss, best", "tokens", "tokens/s, median")
SPIKES = ("step", "loss", "usual loss", "deviations", "loss: samples, of each micro-batch")


def write_page(folders: Sequence[Path], target: Path) -> None:
    """Write it. Raises `ValueError` for a folder without a log, a log without a step, or if matplotlib is missing."""
    runs = {str(folder): _read(folder) for folder in folders}
    plots = "".join(
        f"<div><h3>{title}</h3>{_plot(keys, runs)}</div>"
        for title, keys in PLOTS.items()
        if any(key in entry for entries in runs.values() for entry in entries for key in keys)
    )
    summary = _table(SUMMARY, [(name, *_summary(entries)) for name, entries in runs.items()])
    found = [(name, *_spike(entry)) for name, entries in runs.items() for entry in entries if "spike_loss" in entry]
    spikes = f"<h3>losses that stand out</h3>{_table(SPIKES, found)}" if found else ""
    title = html.escape(", ".join(runs))
    target.write_text(PAGE.format(title=title, summary=summary, plots=plots, spikes=spikes), encoding="utf-8")


def _read(folder: Path) -> list[Entry]:
    file = folder / LOG
    if not file.is_file():
        raise ValueError(f"{folder} has no {LOG}. Give the output folder of a run.")
    entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if not any("loss" in entry for entry in entries):
        raise ValueError(f"{file} has no optimizer step yet.")
    return entries


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
        f"{steps[0]['loss']:.4f}",
        f"{steps[-1]['loss']:.4f}",
        f"{min(evaluated):.4f}" if evaluated else "",
        f"{steps[-1]['num_tokens']:,.0f}",
        f"{rates[len(rates) // 2]:,.0f}",
    )


def _spike(entry: Entry) -> tuple[str, ...]:
    micro_batches = (f"{one['loss']:.4f}: {', '.join(map(str, one['samples']))}" for one in entry["spike_in"])
    return (
        f"{entry['step']:,}",
        f"{entry['spike_loss']:.4f}",
        f"{entry['spike_usual_loss']:.4f}",
        f"{entry['spike_deviations']:.1f}",
        "; ".join(micro_batches),
    )


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
            points = [(entry["step"], entry[key]) for entry in entries if key in entry]
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
