"""Losses that stand out from those of the steps before."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import NamedTuple

HISTORY, LEVEL = 128, 16
"""Steps by which noise is told, and the last of them, by which what is usual is; with fewer nothing is said."""


class Spike(NamedTuple):
    """A loss, and what it was expected to be near."""

    loss: float
    usual_loss: float
    deviations: float
    """Between them, in standard deviations of the steps before."""


class SpikeWatch:
    """A comparison of each loss with the median of the last ones, in standard deviations that no spike or trend widens.

    The deviation is told by differences of neighbours (Rice, "Bandwidth choice for nonparametric regression", 1984), by
    their median instead of their mean: 1.0483 times it for normal noise; and it is at least a hundredth of the loss.
    """

    def __init__(self, threshold: float, losses: Iterable[float] = ()) -> None:
        """Deviations that make a spike, 0 for none; losses of a run that goes on."""
        self._threshold = threshold
        self._losses = deque(filter(math.isfinite, losses), maxlen=HISTORY)

    def see(self, loss: float) -> Spike | None:
        """Compare the next loss with those before it."""
        if not self._threshold or not math.isfinite(loss):
            return None
        before = list(self._losses)
        self._losses.append(loss)
        if len(before) < LEVEL:
            return None
        usual = median(before[-LEVEL:])
        noise = 1.0483 * median(abs(right - left) for left, right in pairwise(before))
        deviations = (loss - usual) / max(noise, 0.01 * usual)
        return Spike(loss, usual, deviations) if deviations >= self._threshold else None
