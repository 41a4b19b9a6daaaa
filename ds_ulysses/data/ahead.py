"""The next optimizer step is planned and its batches are put together while this one is computed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from torch import Tensor

from ds_ulysses.data.samples import Samples, Stream, collate
from ds_ulysses.data.steps import Batching, StepOrder


class ReadyStep(NamedTuple):
    """A step, and what this replica computes of it."""

    order: StepOrder
    batches: list[dict[str, Tensor]]
    """Of each accumulated micro-batch."""


def ready_steps(
    orders: Iterator[StepOrder], samples: Samples | Stream, batching: Batching, dp_rank: int
) -> Iterator[ReadyStep]:
    """Yield orders with their batches, one step ahead on a thread of its own. What goes wrong there is raised here."""

    def prepare() -> ReadyStep | None:
        order = next(orders, None)
        if order is None:
            return None
        mine = [replicas[dp_rank] for replicas in order.micro_batches]
        return ReadyStep(order, [collate([samples.fetch(d) for d in documents], batching.flat) for documents in mine])

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as thread:
        pending = thread.submit(prepare)
        while (ready := pending.result()) is not None:
            pending = thread.submit(prepare)
            yield ready
