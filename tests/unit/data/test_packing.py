"""Rows without padding and micro-batches of equal cost, on any lengths."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ulysses.data.packing import balanced_rows, pack, spread

lengths_of = st.lists(st.integers(1, 100), max_size=60)


@given(lengths_of)
def test_pack_puts_each_document_into_one_row_that_holds_it(lengths: list[int]) -> None:
    rows = pack(lengths, 100)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert max(filled, default=0) <= 100
    assert sum(total <= 50 for total in filled) <= 1, "two rows that fit into one"


def test_pack_takes_the_fullest_row_that_has_room() -> None:
    assert pack([60, 50, 40, 45, 5], 100) == [[0, 2], [1, 3, 4]]


def test_a_document_that_fits_nowhere() -> None:
    with pytest.raises(ValueError, match="A document of 101 tokens does not fit in a row of 100"):
        pack([3, 101], 100)


@given(st.lists(st.integers(1, 50), max_size=7), st.integers(1, 3))
def test_spread_is_within_a_third_of_the_best_there_is(costs: list[int], num_groups: int) -> None:
    """Graham's bound for the costliest first, against every assignment there is."""
    groups = spread(costs, costs, num_groups, capacity=1000)
    assert groups is not None
    assert sorted(index for group in groups for index in group) == list(range(len(costs)))
    best = min(
        max(sum(c for c, g in zip(costs, assigned, strict=True) if g == group) for group in range(num_groups))
        for assigned in product(range(num_groups), repeat=len(costs))
    )
    found = max(sum(costs[index] for index in group) for group in groups)
    assert best <= found <= best * (4 - 1 / num_groups) / 3 + 1e-9


@given(lengths_of, st.integers(1, 8), st.integers(100, 400))
def test_spread_keeps_to_the_capacity(sizes: list[int], num_groups: int, capacity: int) -> None:
    groups = spread([size**2 for size in sizes], sizes, num_groups, capacity)
    if groups is None:
        assert sum(sizes) > num_groups * (capacity - 100)
        return
    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    assert all(sum(sizes[index] for index in group) <= capacity for group in groups)


def test_a_full_group_waits_until_documents_are_small_enough() -> None:
    """The cheap group has no room for 20 more tokens, but has for 10."""
    assert spread([9.0, 5.0, 2.0, 1.0], [80, 90, 20, 10], 2, 100) == [[0, 2], [1, 3]]
    assert spread([1.0, 1.0], [60, 60], 1, 100) is None


@given(lengths_of)
def test_balanced_rows_are_packs_too(lengths: list[int]) -> None:
    rows = balanced_rows([length**2 for length in lengths], lengths, 100)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 100 for row in rows)
    assert len(rows) >= len(pack(lengths, 100))


def test_balanced_rows_put_long_beside_short() -> None:
    lengths = [50, 50, *[5] * 20]
    assert [sorted(lengths[i] for i in row)[-1] for row in pack(lengths, 100)] == [50, 5]
    assert [sorted(lengths[i] for i in row) for row in balanced_rows([x**2 for x in lengths], lengths, 100)] == [
        [*[5] * 10, 50],
        [*[5] * 10, 50],
    ]


def test_balanced_rows_take_another_row_where_the_cheapest_leaves_no_room() -> None:
    """Best fit fills two rows with 60 + 40 and 50 + 30 + 20; by cost, 40 and 30 join 50 and no room is left for 20."""
    lengths = [60, 50, 40, 30, 20]
    assert len(pack(lengths, 100)) == 2
    assert spread([x**2 for x in lengths], lengths, 2, 100) is None
    assert [[lengths[i] for i in row] for row in balanced_rows([x**2 for x in lengths], lengths, 100)] == [
        [60],
        [50, 20],
        [40, 30],
    ]
