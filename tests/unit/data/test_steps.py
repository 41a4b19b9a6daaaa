"""Which samples a step takes, and how they are spread over its micro-batches."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ulysses.config.deepspeed_json import BatchSizes
from ds_ulysses.data.cost import Cost
from ds_ulysses.data.steps import Batching, Document, StepOrder, count_steps, micro_batches, order_steps
from ds_ulysses.data.survey import Survey, survey_epoch

MAX = 100
COST = Cost(linear=40.0, quadratic=1.0)


def batching(micro: int, accumulation: int, dp: int, **changes: Any) -> Batching:
    sizes = BatchSizes(micro * accumulation * dp, micro, accumulation)
    return Batching(sizes, dp, changes.pop("cost", COST), MAX, **changes)


def documents(lengths: list[int], epoch: int, seed: int) -> list[Document]:
    order = list(enumerate(lengths))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return [Document(id, length, length - 1) for id, length in order]


def first_epoch(lengths: list[int], how: Batching) -> list[StepOrder]:
    orders = order_steps(partial(documents, lengths), len(lengths), how)
    return list(islice(orders, count_steps(partial(documents, lengths), len(lengths), how, 1)))


ways = st.builds(
    batching,
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    packing=st.booleans(),
    padding_free=st.booleans(),
    seed=st.integers(0, 3),
)
many_lengths = st.lists(st.integers(2, MAX), min_size=1, max_size=40)


@given(many_lengths, ways)
def test_an_epoch_has_each_sample_once_and_every_rank_the_same_micro_steps(lengths: list[int], how: Batching) -> None:
    orders = first_epoch(lengths, how)
    assert sorted(d.id for order in orders for d in order.documents) == list(range(len(lengths)))
    assert orders[-1].epoch == 1.0
    for order in orders:
        assert [len(replicas) for replicas in order.micro_batches] == [how.dp_size] * how.sizes.accumulation
        for group in (group for replicas in order.micro_batches for group in replicas):
            room = MAX * how.sizes.micro if how.packing else how.sizes.micro
            assert sum(d.length if how.packing else 1 for d in group) <= room


@given(many_lengths, st.booleans(), st.booleans())
def test_a_step_takes_the_same_samples_however_it_is_spread(
    lengths: list[int], packing: bool, padding_free: bool
) -> None:
    """12 rows of a step, as 12 micro-batches of one replica, 2 x 3 of two rows, or 4 x 3."""
    same = [
        batching(1, 12, 1, packing=packing, padding_free=padding_free),
        batching(2, 2, 3, packing=packing, padding_free=padding_free),
        batching(1, 4, 3, packing=packing, padding_free=padding_free),
    ]
    steps = [[sorted(d.id for d in order.documents) for order in first_epoch(lengths, how)] for how in same]
    assert steps[0] == steps[1] == steps[2]
    targets = [[sum(order.num_targets()) for order in first_epoch(lengths, how)] for how in same]
    assert targets[0] == targets[1] == targets[2]


@pytest.mark.parametrize("packing", [False, True])
def test_the_order_depends_on_seed_and_epoch_alone(packing: bool) -> None:
    lengths = [2 + i for i in range(60)]

    def order(how: Batching, num_epochs: float = 1) -> list[list[int]]:
        source = partial(documents, lengths)
        num_steps = count_steps(source, 60, how, num_epochs)
        return [sorted(d.id for d in order.documents) for order in islice(order_steps(source, 60, how), num_steps)]

    how = batching(1, 2, 2, packing=packing)
    assert order(how) == order(how)
    assert order(how) != order(replace(how, seed=1))
    both = order(how, 2)
    assert both[: len(order(how))] == order(how)
    assert both[len(order(how)) :] != order(how)


def test_replicas_that_run_together_cost_about_the_same() -> None:
    """Few long documents among many short ones, as real data has them, in packs of 100 to 200 tokens."""
    drawn = random.Random(0)
    lengths = [min(MAX // 2, max(2, round(drawn.lognormvariate(2.5, 1.0)))) for _ in range(600)]
    how = batching(2, 2, 4, packing=True)
    orders = first_epoch(lengths, how)
    balanced, as_they_come = Survey(how, 1), Survey(how, 1)
    for order in orders:
        balanced.add(order)
        slots: list[list[Document]] = [[] for _ in range(8)]
        for d in sorted(order.documents, key=lambda d: d.id):
            min(slots, key=lambda slot: sum(x.length for x in slot)).append(d)
        as_they_come.add(StepOrder(1.0, [slots[:4], slots[4:]]))
    assert balanced.imbalance < 1.01
    assert as_they_come.imbalance > 1.1
    first = orders[0].micro_batches
    costs = [sum(COST.of_each([d.length for d in documents])) for replicas in first for documents in replicas]
    assert max(costs) in costs[: how.dp_size], "the costliest come first"


def test_where_single_documents_leave_no_room_whole_packs_are_spread() -> None:
    """60 + 40 and 50 + 30 + 20 as rows of one step: by cost, 40 and 30 would join 50, and 20 fit nowhere."""
    rows = [[Document(i, x, 1) for i, x in enumerate(row)] for row in ([60, 40], [50, 30, 20])]
    (groups,) = micro_batches(rows, batching(1, 1, 2, packing=True, cost=Cost(0.0, 1.0)))
    assert [[d.length for d in group] for group in groups] == [[60, 40], [50, 30, 20]]


def test_without_packing_rows_of_like_length_share_a_micro_batch() -> None:
    order = first_epoch([90, 10, 80, 20], batching(2, 1, 2))[0]
    assert [sorted(d.length for d in group) for group in order.micro_batches[0]] == [[80, 90], [10, 20]]


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 2), (1, 3), (1.5, 5), (2, 6)])
def test_steps_of_some_epochs(epochs: float, steps: int) -> None:
    """10 samples by 4: the third step of an epoch is short."""
    assert count_steps(partial(documents, [5] * 10), 10, batching(4, 1, 1), epochs) == steps


def test_an_endless_stream_has_no_epochs_to_count_but_goes_on() -> None:
    orders = list(islice(order_steps(partial(documents, [5, 6, 7]), None, batching(2, 1, 1)), 5))
    assert [len(order.documents) for order in orders] == [2, 1, 2, 1, 2]
    assert [order.epoch for order in orders] == [0, 0, 1, 1, 2]


def test_data_without_a_sample_ends_with_an_error() -> None:
    with pytest.raises(ValueError, match="Epoch 0 of the data has no sample with a supervised token"):
        next(order_steps(lambda epoch, seed: [], None, batching(1, 1, 1)))


def test_survey_counts_what_is_computed() -> None:
    """Lengths 7, 3, 5 on one replica of 4 ranks that share a row."""
    source = partial(documents, [7, 3, 5])
    padded = survey_epoch(source, 3, batching(3, 1, 1), sp_size=4)
    assert (padded.real_tokens, padded.computed_tokens, padded.longest) == (15, 3 * 8, 8)
    flat = survey_epoch(source, 3, batching(3, 1, 1, padding_free=True), sp_size=4)
    assert (flat.computed_tokens, flat.padded_tokens, flat.longest) == (16, 24, 16)
    assert flat.padding == pytest.approx(1 / 16)
    alone = survey_epoch(source, 3, batching(1, 1, 2), sp_size=1)
    assert (alone.num_steps, alone.num_micro_steps, alone.computed_tokens) == (2, 2, 16)  # one of them is empty


def test_imbalance_is_waiting() -> None:
    how = batching(1, 2, 2, cost=Cost(1.0, 0.0))
    order = StepOrder(1.0, [[[Document(0, 30, 1)], [Document(1, 10, 1)]], [[Document(2, 20, 1)], []]])
    assert Survey(how, 1).add(order).imbalance == pytest.approx((30 + 20) / (20 + 10))
