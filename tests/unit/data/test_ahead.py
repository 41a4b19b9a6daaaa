"""Steps are made ready off the training thread, in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from itertools import islice

import pytest
from datasets import Dataset

from ds_ulysses.data.ahead import ready_steps
from ds_ulysses.data.samples import collate
from ds_ulysses.data.steps import StepOrder, order_steps
from tests.unit.data.test_samples import chat, samples_of
from tests.unit.data.test_steps import batching


def test_ready_steps_are_the_plans_with_this_replicas_batches() -> None:
    samples = samples_of(Dataset.from_list([chat("one " * i) for i in range(1, 20)]), 64)
    how = batching(2, 2, 2, padding_free=True)
    order = partial(order_steps, samples.documents, len(samples), how)
    expected = list(islice(order(), 4))
    for dp_rank in (0, 1):
        found = list(ready_steps(islice(order(), 4), samples, how, dp_rank))
        assert [step.order for step in found] == expected
        for step in found:
            for batch, replicas in zip(step.batches, step.order.micro_batches, strict=True):
                right = collate([samples.fetch(d) for d in replicas[dp_rank]], True)
                assert {key: value.tolist() for key, value in batch.items()} == {
                    key: value.tolist() for key, value in right.items()
                }


def test_one_step_ahead_on_a_thread_of_its_own() -> None:
    samples = samples_of(Dataset.from_list([chat("one")]))
    how = batching(1, 1, 1)
    started, threads = [threading.Event() for _ in range(4)], set()

    def orders() -> Iterator[StepOrder]:
        for event in started:
            threads.add(threading.get_ident())
            event.set()
            yield StepOrder(0.0, [[[]]])

    steps = ready_steps(orders(), samples, how, 0)
    next(steps)
    assert started[1].wait(10), "the second step is being prepared while the first is computed"
    assert not started[2].wait(0.2), "but no more than that"
    assert len(list(steps)) == 3
    assert threading.get_ident() not in threads


def test_what_goes_wrong_on_the_thread_is_raised_here() -> None:
    def orders() -> Iterator[StepOrder]:
        yield StepOrder(0.0, [[[]]])
        raise ValueError("a row that cannot be read")

    steps = ready_steps(orders(), samples_of(Dataset.from_list([chat("one")])), batching(1, 1, 1), 0)
    next(steps)
    with pytest.raises(ValueError, match="a row that cannot be read"):
        next(steps)
