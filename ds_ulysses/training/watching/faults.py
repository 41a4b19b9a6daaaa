"""What can go wrong in the middle of a run, and what is done about it."""

from __future__ import annotations

import faulthandler
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from ds_ulysses.comm import any_rank
from ds_ulysses.data import Documents
from ds_ulysses.engine import SequenceParallelEngine


class NotFinite(Exception):
    """A step whose gradient is not a number or infinite; weights and optimizer are as they were before it."""

    def __init__(self, step: int, documents: Documents) -> None:
        ids = sorted(document.id for document in documents)
        super().__init__(
            f"The gradient of step {step} is not finite. Its rows of the data, from 0 on: {ids}. The weights are those "
            f"of the step before. Look at these samples, lower --learning_rate, resume from a checkpoint, or go on "
            f"with --skip_nonfinite_steps."
        )


class StepGuard:
    """A guard before the optimizer, where the norm of the whole gradient is known and nothing has changed yet.

    A step that is not finite changes nothing. ZeRO in fp32 leaves such steps out itself, and without a word; with fp16
    they are part of how DeepSpeed finds the loss scale.
    """

    def __init__(self, engine: SequenceParallelEngine) -> None:
        self._engine, self._left_out = engine, False
        # DeepSpeed's optimizers wrap the one that steps, and keep the norm; plain fp32 has no wrapper.
        keeper: Any = engine.optimizer if hasattr(engine.optimizer, "optimizer") else engine
        optimizer: Any = getattr(engine.optimizer, "optimizer", engine.optimizer)
        step = optimizer.step

        @wraps(step)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._left_out = not math.isfinite(float(keeper._global_grad_norm))
            return None if self._left_out else step(*args, **kwargs)

        optimizer.step = guarded

    def left_out(self) -> bool:
        """Say whether the last step was left out; the same on every rank."""
        overflow = bool(getattr(self._engine.optimizer, "overflow", False)) and not self._engine.fp16_enabled()
        return self._left_out or overflow


class StopRequest:
    """The request to end after the current step: SIGTERM, as a scheduler sends it before it takes the machine away."""

    def __init__(self) -> None:
        self._asked = False

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Listen for the signal until the block ends."""
        before = signal.signal(signal.SIGTERM, self._ask)
        try:
            yield self
        finally:
            signal.signal(signal.SIGTERM, before)

    def _ask(self, *_: Any) -> None:
        self._asked = True

    def agreed(self, device: torch.device) -> bool:
        """Say whether any rank was asked. Collective."""
        return any_rank(self._asked, device)


@contextmanager
def watchdog(seconds: int) -> Iterator[Callable[[], None]]:
    """Yield what is to be called at least so often in the block, once it was called; 0: never.

    Otherwise the stack of every thread of this rank is written to stderr, and the rank ends.
    """

    def feed() -> None:
        if seconds:
            faulthandler.dump_traceback_later(seconds, exit=True)

    try:
        yield feed
    finally:
        faulthandler.cancel_dump_traceback_later()
