"""Which losses stand out, and how far, by numbers made by hand."""

from __future__ import annotations

import math
import random

import pytest

from ds_ulysses.training.watching.spikes import HISTORY, LEVEL, SpikeWatch

CALM = [2.0, 2.1, 1.9, 2.05, 1.95] * 4
"""The median of the last 16 is 2.0; neighbours differ by 0.1, 0.2, 0.15, 0.1, 0.05, in turn."""


def test_deviations_are_those_of_the_steps_before() -> None:
    watch = SpikeWatch(5.0, CALM)
    assert watch.see(2.5) is None
    spike = SpikeWatch(5.0, CALM).see(2.6)
    assert spike is not None
    assert (spike.loss, spike.usual_loss) == (2.6, 2.0)
    assert spike.deviations == pytest.approx(0.6 / (1.0483 * 0.1))
    assert watch.see(0.1) is None, "a loss that is low is no spike"


def test_noise_of_a_known_size() -> None:
    drawn = random.Random(0)
    spike = SpikeWatch(5.0, [drawn.gauss(3.0, 0.2) for _ in range(HISTORY)]).see(5.0)
    assert spike is not None
    assert spike.deviations == pytest.approx(10.0, rel=0.2)


def test_a_spike_on_the_way_down_is_seen() -> None:
    """It is less than the losses at the beginning, and far more than the last."""
    falling = [4.0 * 0.9**i for i in range(20)]
    assert all(SpikeWatch(5.0, falling[:i]).see(falling[i]) is None for i in range(20))
    spike = SpikeWatch(5.0, falling).see(3.0)
    assert spike is not None
    assert spike.usual_loss < 1.3


def test_a_spike_does_not_hide_the_next_but_a_new_level_becomes_usual() -> None:
    watch = SpikeWatch(5.0, CALM)
    assert all(watch.see(9.0) for _ in range(LEVEL // 2))
    for _ in range(LEVEL):
        watch.see(9.0)
    assert watch.see(9.0) is None
    assert watch.see(20.0) is not None


def test_nothing_is_said_of_too_few_steps_or_of_a_loss_that_is_no_number() -> None:
    watch = SpikeWatch(5.0)
    assert [watch.see(2.0 if i < LEVEL - 1 else 90.0) for i in range(LEVEL)] == [None] * LEVEL
    assert watch.see(math.nan) is None
    assert watch.see(math.inf) is None
    assert watch.see(90.0) is not None


def test_a_loss_that_hardly_moves_is_measured_in_hundredths_of_it() -> None:
    assert SpikeWatch(5.0, [2.0] * 20).see(2.099) is None
    spike = SpikeWatch(5.0, [2.0] * 20).see(2.101)
    assert spike is not None
    assert spike.deviations == pytest.approx(5.05)


def test_it_can_be_turned_off() -> None:
    assert SpikeWatch(0.0, CALM).see(90.0) is None
