"""What a run says while it goes: a progress bar for people, one JSON object per step for programs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from ds_ulysses.data import StepOrder, Survey
from ds_ulysses.training.evaluation import Evaluation
from ds_ulysses.training.run import Run
from ds_ulysses.training.watching.device import peak_flops, peak_memory
from ds_ulysses.training.watching.report import LOG
from ds_ulysses.training.watching.spikes import Spike


class TrainingLog:
    """The log of a run, which writes on the first rank only; on others every call does nothing.

    Where a run goes on, what its log has of the steps that come again is taken out first.
    """

    def __init__(self, run: Run) -> None:
        writes, done = run.rank == 0, run.progress.step
        self._progress, self._monitor = run.progress, run.engine.monitor
        self._num_devices, self._peak_flops = run.engine.topology.world_size, peak_flops()
        self._bar: Any = tqdm(total=run.num_steps, initial=done, desc="training", unit="step", disable=not writes)
        self._file = _continued(run.output_dir / LOG, done).open("a", encoding="utf-8") if writes else None
        self.losses_before = _losses(run.output_dir / LOG) if writes else []
        """Of the steps that are done; on the first rank only."""
        self._begun = time.monotonic()

    def step(self, batches: Survey, **values: float | None) -> None:
        """Log an optimizer step that was just counted. Rates are of real tokens since the last entry.

        `tflops_per_device` and `mfu` count the model's operations alone: causal pairs, nothing that is recomputed.
        Memory, bytes and seconds of exchanges are those of this rank.
        """
        seconds = self._seconds()
        flops = batches.model_flops / seconds / self._num_devices
        self._write(
            **values,
            tokens_per_second=batches.real_tokens / seconds,
            tokens_per_second_per_device=batches.real_tokens / seconds / self._num_devices,
            tflops_per_device=flops / 1e12,
            mfu=flops / self._peak_flops if self._peak_flops else None,
            peak_memory_gib=peak_memory() / 2**30,
            num_tokens=self._progress.num_tokens,
            padding=batches.padding,
            imbalance=batches.imbalance,
        )
        shown = {"loss": values["loss"], "lr": values["learning_rate"], "grad_norm": values["grad_norm"]}
        self._bar.set_postfix({k: f"{v:.4g}" for k, v in shown.items() if v is not None}, refresh=False)
        self._bar.update()

    def evaluation(self, evaluation: Evaluation) -> None:
        """Log an evaluation after the last step."""
        self._write(
            eval_loss=evaluation.loss,
            eval_perplexity=evaluation.perplexity,
            eval_num_targets=evaluation.num_targets,
            eval_seconds=self._seconds(),
        )
        if self._file is not None:
            self._bar.write(f"step {self._progress.step}: eval_loss {evaluation.loss:.4f}")

    def spike(self, spike: Spike, order: StepOrder, micro_losses: list[float]) -> None:
        """Log that the loss of the last step stands out, and what it learnt from: by micro-batch, ids of samples."""
        values = {f"spike_{key}": value for key, value in spike._asdict().items()}
        self._notice(
            values | {"spike_in": _by_micro_batch(order, micro_losses)},
            f"loss {spike.loss:.4f}, {spike.deviations:.1f} deviations above the usual {spike.usual_loss:.4f}",
        )

    def left_out(self, order: StepOrder, micro_losses: list[float]) -> None:
        """Log that the last step changed nothing because its gradient is not finite, and its samples alike."""
        self._notice({"left_out": _by_micro_batch(order, micro_losses)}, "left out, its gradient is not finite")

    def _notice(self, entry: dict[str, Any], text: str) -> None:
        if self._file is not None:
            self._append(entry)
            self._bar.write(f"step {self._progress.step}: {text}; its samples are in {LOG}")

    def _seconds(self) -> float:
        """Since the last entry."""
        now = time.monotonic()
        seconds, self._begun = now - self._begun, now
        return seconds

    def _write(self, **values: float | None) -> None:
        """To the file, and to whatever DeepSpeed's monitor writes to."""
        if self._file is None:
            return
        known = {key: value for key, value in values.items() if value is not None}
        self._append(known)
        if self._monitor.enabled:
            self._monitor.write_events([(f"train/{key}", value, self._progress.step) for key, value in known.items()])

    def _append(self, entry: dict[str, Any]) -> None:
        assert self._file is not None
        line = json.dumps({"step": self._progress.step} | entry)
        self._file.write(json.dumps(json.loads(line, parse_constant=lambda _: None)) + "\n")  # JSON knows no NaN
        self._file.flush()

    def __enter__(self) -> TrainingLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._file is not None:
            self._file.close()


def _continued(path: Path, done: int) -> Path:
    """The log, with no more than the entries of the steps that are done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf-8").splitlines() if done and path.exists() else []
    kept = [line for line in lines if json.loads(line)["step"] <= done]
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    return path


def _losses(path: Path) -> list[float]:
    entries = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [entry["loss"] for entry in entries if entry.get("loss") is not None]


def _by_micro_batch(order: StepOrder, losses: list[float]) -> list[dict[str, Any]]:
    samples = [[d.id for documents in replicas for d in documents] for replicas in order.micro_batches]
    return [{"loss": loss, "samples": ids} for loss, ids in zip(losses, samples, strict=True)]
