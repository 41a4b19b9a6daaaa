"""The head split covers everything once, for any numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ulysses.placement.heads import HeadSplit

splits = st.builds(
    lambda groups, kv, sp: HeadSplit(groups * kv, kv, sp),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 17),
)


@given(splits)
def test_query_heads_are_cut_into_nearly_equal_neighbours(split: HeadSplit) -> None:
    ranges = [split.q_range(rank) for rank in range(split.sp_size)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == split.num_heads
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert split.imbalance == pytest.approx(max(sizes) / (split.num_heads / split.sp_size))


@given(splits)
def test_each_rank_gets_exactly_the_kv_heads_that_it_needs(split: HeadSplit) -> None:
    for rank in range(split.sp_size):
        needed = {head // split.queries_per_kv for head in range(*split.q_range(rank))}
        assert set(range(*split.kv_range(rank))) == needed


@given(splits)
def test_runs_map_each_query_head_to_its_kv_head_without_expansion(split: HeadSplit) -> None:
    for rank in range(split.sp_size):
        q_first, kv_first = split.q_range(rank)[0], split.kv_range(rank)[0]
        runs = split.runs(rank)
        owners = {}
        for run in runs:
            per_kv, rest = divmod(run.q_stop - run.q_start, run.kv_stop - run.kv_start)
            assert rest == 0
            for q in range(run.q_start, run.q_stop):
                owners[q_first + q] = kv_first + run.kv_start + (q - run.q_start) // per_kv
        assert owners == {head: head // split.queries_per_kv for head in range(*split.q_range(rank))}
        assert len(runs) <= 3
        assert runs == sorted(runs)


@given(splits, st.integers(1, 6))
def test_groups_bring_every_head_once_and_use_what_was_brought(split: HeadSplit, num_groups: int) -> None:
    for rank in range(split.sp_size):
        groups = split.groups(rank, num_groups)
        assert len(groups) == num_groups
        assert [head for group in groups for head in range(*group.q_range)] == list(range(*split.q_range(rank)))
        assert [head for group in groups for head in range(*group.kv_range)] == list(range(*split.kv_range(rank)))
        sizes = [group.q_range[1] - group.q_range[0] for group in groups]
        assert max(sizes) - min(sizes) <= 1
        for index, group in enumerate(groups):
            owners = {}
            for owner, run in group.runs:
                assert owner <= index
                for q in range(run.q_start, run.q_stop):
                    kv = run.kv_start + (q - run.q_start) // run.size_per_kv
                    assert kv < run.kv_stop
                    owners[group.q_range[0] + q] = groups[owner].kv_range[0] + kv
                if owner < index:  # only the last KV head of a group is needed later
                    assert (run.kv_start, run.kv_stop) == (kv, groups[owner].kv_range[1] - groups[owner].kv_range[0])
            assert owners == {head: head // split.queries_per_kv for head in range(*group.q_range)}


def test_the_picture_in_the_module() -> None:
    split = HeadSplit(9, 3, 2)
    assert [split.q_range(0), split.q_range(1)] == [(0, 5), (5, 9)]
    assert [split.kv_range(0), split.kv_range(1)] == [(0, 2), (1, 3)]


@pytest.mark.parametrize(("heads", "kv"), [(5, 2), (2, 4), (4, 0)])
def test_ragged_groups_are_refused(heads: int, kv: int) -> None:
    with pytest.raises(ValueError, match=f"{heads} query heads over {kv} KV heads"):
        HeadSplit(heads, kv, 2)
