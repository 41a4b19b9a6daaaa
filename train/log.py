"""What a run says while it goes: a progress bar for people, one JSON object per step for programs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from train.survey import Survey

FILE_NAME = "train_log.jsonl"


class TrainingLog:
    """Writes on the first rank only; on others every call does nothing."""

    def __init__(self, output_dir: Path, num_steps: int, writes: bool) -> None:
        if writes:
            output_dir.mkdir(parents=True, exist_ok=True)
        self.num_tokens = 0
        self._bar: Any = tqdm(total=num_steps, desc="training", unit="step", disable=not writes)
        self._file = (output_dir / FILE_NAME).open("w", encoding="utf-8") if writes else None
        self._begun = time.monotonic()

    def step(self, batches: Survey, **values: float | None) -> None:
        """Log one optimizer step, of which `batches` counts real tokens of all replicas; the rate is since the last."""
        now = time.monotonic()
        seconds, self._begun = now - self._begun, now
        self.num_tokens += batches.real_tokens
        entry = values | {
            "tokens_per_second": batches.real_tokens / seconds,
            "num_tokens": self.num_tokens,
            "padding": batches.padding,
            "imbalance": batches.imbalance,
        }
        if self._file is not None:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        shown = {"loss": values["loss"], "lr": values["learning_rate"], "grad_norm": values["grad_norm"]}
        self._bar.set_postfix({k: f"{v:.4g}" for k, v in shown.items() if v is not None}, refresh=False)
        self._bar.update()

    def __enter__(self) -> TrainingLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._file is not None:
            self._file.close()
