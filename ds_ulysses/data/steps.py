"""Which documents an optimizer step takes, and which of its micro-batches each is in.

The documents of a step are a function of the data, the model, the seed and the batch size: an epoch's order is cut into
as many rows as a step takes. Only then are they spread over micro-batches, so that those that run at the same time on
different replicas cost the same. Neither the number of ranks nor the spreading change what a step learns from.

Where the last step of an epoch runs short, micro-batches stay empty: nothing is repeated or dropped, and all ranks take
the same number of them, as ZeRO-3 needs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from ds_ulysses.config import BatchSizes
from ds_ulysses.data.cost import Cost
from ds_ulysses.data.packing import balanced_rows, spread

WINDOW = 4096
"""Documents that are packed together; more at once would fill rows little better."""


class Document(NamedTuple):
    """One sample: which it is, and what is to be known of it beforehand."""

    id: int
    """Its row in the data, or its place in a stream."""
    length: int
    num_targets: int
    tokens: Any = None
    """Its `input_ids` and `labels`, if it was read from a stream; otherwise they are fetched by its id."""


Documents = list[Document]


@dataclass(frozen=True)
class Batching:
    """The way in which documents become micro-batches."""

    sizes: BatchSizes
    dp_size: int
    cost: Cost
    max_length: int
    """Tokens of a document at most, and of a pack."""
    packing: bool = False
    """Documents are put together into packs; batch sizes count them, otherwise documents."""
    padding_free: bool = False
    """The documents of a micro-batch stand in one row, as packed ones always do, instead of padded rows."""
    seed: int = 0

    @property
    def flat(self) -> bool:
        """Whether a micro-batch is one row without padding."""
        return self.packing or self.padding_free

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches of a step, on all replicas."""
        return self.sizes.accumulation * self.dp_size


class StepOrder(NamedTuple):
    """One optimizer step: the documents of each of its micro-batches."""

    epoch: float
    """Passes over the data, this step included."""
    micro_batches: list[list[Documents]]
    """[accumulation][replica]"""

    @property
    def documents(self) -> Documents:
        """The documents of all its micro-batches."""
        return [document for replicas in self.micro_batches for documents in replicas for document in documents]

    def num_targets(self) -> list[int]:
        """Count the supervised tokens of each accumulated micro-batch, on all replicas."""
        return [sum(d.num_targets for documents in replicas for d in documents) for replicas in self.micro_batches]


Source = Callable[[int, int], Iterable[Document]]
"""The documents of an epoch, given its number and the seed, in order."""


def order_steps(source: Source, num_documents: int | None, batching: Batching) -> Iterator[StepOrder]:
    """Yield the steps of epoch after epoch without end. `num_documents` of an epoch, or None if that is not known."""
    for epoch, rows in step_rows(source, num_documents, batching):
        yield StepOrder(epoch, micro_batches(rows, batching))


def order_epoch(source: Source, num_documents: int, batching: Batching) -> Iterator[StepOrder]:
    """Yield the steps of the first epoch alone."""
    for order in order_steps(source, num_documents, batching):
        yield order
        if order.epoch >= 1:
            return


def count_steps(source: Source, num_documents: int, batching: Batching, num_epochs: float) -> int:
    """Count the optimizer steps until so many epochs have passed."""
    for number, (epoch, _) in enumerate(step_rows(source, num_documents, batching), start=1):
        if epoch >= num_epochs - 1e-9:
            return number
    raise AssertionError("epochs follow one another without end")


def step_rows(source: Source, num_documents: int | None, batching: Batching) -> Iterator[tuple[float, list[Documents]]]:
    """Yield the epochs passed after each step, and the rows that it takes."""
    epoch = 0
    while True:
        done, rows = 0, _rows(source(epoch, batching.seed), random.Random(f"{batching.seed} {epoch}"), batching)
        while step := list(islice(rows, batching.sizes.train)):
            done += sum(map(len, step))
            yield epoch + (done / num_documents if num_documents else 0.0), step
        if done == 0:
            raise ValueError(
                f"Epoch {epoch} of the data has no sample with a supervised token: nothing would be learnt."
            )
        epoch += 1


def _rows(documents: Iterable[Document], drawn: random.Random, batching: Batching) -> Iterator[Documents]:
    """Packed window by window, in random order: the rows come out sorted by their longest document."""
    if not batching.packing:
        yield from ([document] for document in documents)
        return
    documents = iter(documents)
    while window := list(islice(documents, WINDOW)):
        sizes = [document.length for document in window]
        rows = balanced_rows(batching.cost.of_each(sizes), sizes, batching.max_length)
        drawn.shuffle(rows)
        yield from ([window[index] for index in row] for row in rows)


def micro_batches(rows: list[Documents], batching: Batching) -> list[list[Documents]]:
    """Spread the rows of a step over [accumulation][replica] micro-batches of about equal cost.

    Those that run together are as nearly equal as can be, and the dearest come first: what does not fit fails at once.
    """
    bins = _flat_bins(rows, batching) if batching.flat else _padded_bins(rows, batching)
    together = [bins[i : i + batching.dp_size] for i in range(0, len(bins), batching.dp_size)]
    # Back and forth, so that the first replica does not get the dearest of every micro-step.
    return [replicas[::-1] if index % 2 else replicas for index, replicas in enumerate(together)]


def _padded_bins(rows: list[Documents], batching: Batching) -> list[Documents]:
    """Rows are padded to the longest of their micro-batch: neighbours in length stay together."""
    micro, documents = batching.sizes.micro, [document for row in rows for document in row]
    documents.sort(key=lambda document: -document.length)
    return [documents[i * micro : (i + 1) * micro] for i in range(batching.num_micro_batches)]


def _flat_bins(rows: list[Documents], batching: Batching) -> list[Documents]:
    """One by one, or row by row, which always fits, where that leaves no room for some."""
    num_bins, micro = batching.num_micro_batches, batching.sizes.micro
    if batching.packing:
        documents = [document for row in rows for document in row]
        sizes = [document.length for document in documents]
        bins = spread(batching.cost.of_each(sizes), sizes, num_bins, micro * batching.max_length)
        if bins is not None:
            return [[documents[index] for index in chosen] for chosen in bins]
    costs = [sum(batching.cost.of_each([document.length for document in row])) for row in rows]
    bins = spread(costs, [1] * len(rows), num_bins, micro)
    assert bins is not None
    return [[document for index in chosen for document in rows[index]] for chosen in bins]
