"""`shard_batch`, for every rank of any group in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_ulysses import SequenceParallelConfig, Topology, shard_batch
from ds_ulysses.config.constants import IGNORE_INDEX
from ds_ulysses.placement.mesh import Machine, choose_mesh
from tests.models import collate, pack, random_samples


def topology(sp_size: int, rank: int = 0, ring_size: int = 1, layout: str = "zigzag") -> Topology:
    """A rank without groups: sharding needs only its numbers."""
    config = SequenceParallelConfig(sequence_parallel_size=sp_size, ring_size=ring_size, layout=layout)
    mesh = choose_mesh(config, Machine(ranks_per_node=sp_size))
    group: Any = SimpleNamespace(group_name="")
    return Topology(config, rank, sp_size, mesh, group, group, group, group, num_batches=1)


def whole(batch: dict[str, Any], sp_size: int, ring_size: int = 1, layout: str = "zigzag") -> dict[str, Tensor]:
    """The shards of all ranks, put together again, in the order of the ranks."""
    shards = [shard_batch(batch, topology(sp_size, rank, ring_size, layout)) for rank in range(sp_size)]
    joined = {key: torch.cat([shard[key] for shard in shards], dim=1) for key in shards[0] if key != "placement"}
    tables = [shard["placement"].document_table for shard in shards]
    if tables[0] is not None:
        assert all(np.array_equal(table, tables[0]) for table in tables)
        joined["documents"] = torch.from_numpy(tables[0])
    return joined


def targets(batch: dict[str, Tensor]) -> list[tuple[int, int]]:
    """(token that predicts, its target) of each supervised position, sorted."""
    keep = batch["shift_labels"] != IGNORE_INDEX
    return sorted(zip(batch["input_ids"][keep].tolist(), batch["shift_labels"][keep].tolist(), strict=True))


SIZES = st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2), (3, 3), (4, 2), (4, 4), (6, 3)])
"""sp_size and ring_size."""
LAYOUTS = st.sampled_from(["contiguous", "zigzag"])


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=4), SIZES, LAYOUTS, st.sampled_from(["left", "right"]),
    st.integers(0, 99),
)  # fmt: skip
def test_every_target_once_and_no_other(
    lengths: list[int], sizes: tuple[int, int], layout: str, side: str, seed: int
) -> None:
    """Over all ranks: exactly the pairs that each document has alone, whatever the cut and the padding."""
    sp_size, ring_size = sizes
    samples = random_samples(lengths, seed)
    expected = sorted(
        (int(s.ids[i]), int(s.labels[i + 1]))
        for s in samples
        for i in range(len(s.ids) - 1)
        if s.labels[i + 1] != IGNORE_INDEX
    )
    joined = whole(collate(samples, side), sp_size, ring_size, layout)
    assert targets(joined) == expected
    assert joined["input_ids"].shape[1] % sp_size == 0
    assert joined["input_ids"].shape[1] - max(lengths) < sp_size


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), SIZES, LAYOUTS, st.booleans())
def test_packed_documents(lengths: list[int], sizes: tuple[int, int], layout: str, with_mask: bool) -> None:
    samples = random_samples(lengths, prompt=0.0)
    batch = pack(samples)
    if with_mask:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    joined = whole(batch, *sizes, layout)
    assert targets(joined) == sorted((int(s.ids[i]), int(s.ids[i + 1])) for s in samples for i in range(len(s.ids) - 1))
    if len(lengths) > 1 or sum(lengths) % sizes[0]:
        ends = torch.tensor(lengths).cumsum(0).tolist()
        assert joined["documents"].tolist() == [[0, end - n, end] for end, n in zip(ends, lengths, strict=True)]
    else:
        assert "documents" not in joined


def test_zigzag_pairs_early_and_late_tokens() -> None:
    batch = {"input_ids": torch.arange(1, 17)[None], "labels": torch.arange(1, 17)[None]}
    joined = whole(batch, 4, ring_size=2)  # ranks 0 and 1 share the first and last quarter
    assert joined["input_ids"].tolist() == [[1, 2, 3, 4, 13, 14, 15, 16, *range(5, 13)]]
    assert joined["position_ids"].tolist() == [[0, 1, 2, 3, 12, 13, 14, 15, *range(4, 12)]]
    assert joined["shift_labels"].tolist() == [[2, 3, 4, 5, 14, 15, 16, IGNORE_INDEX, *range(6, 14)]]


def test_positions_count_over_the_whole_sequence_from_the_first_real_token() -> None:
    batch = {"input_ids": torch.arange(1, 11)[None].repeat(2, 1), "attention_mask": torch.ones(2, 10)}
    batch["attention_mask"][1, :4] = 0
    joined = whole(batch, 4)
    assert joined["position_ids"][0].tolist() == [*range(10), 0, 0]
    assert joined["position_ids"][1].tolist() == [0, 0, 0, 0, *range(6), 0, 0]
    assert joined["documents"].tolist() == [[0, 0, 10], [1, 4, 10]]
    assert "shift_labels" not in joined


def test_columns_that_no_row_uses_are_cut_off() -> None:
    ids = torch.arange(1, 33).view(2, 16)
    mask = torch.zeros(2, 16)
    mask[0, 4:9], mask[1, 3:7] = 1, 1
    joined = whole({"input_ids": ids, "labels": ids, "attention_mask": mask}, 2)
    assert joined["input_ids"].tolist() == ids[:, 3:9].tolist()
    assert joined["documents"].tolist() == [[0, 1, 6], [1, 0, 4]]


def test_one_row_of_positions_serves_all_rows() -> None:
    batch = {"input_ids": torch.ones(3, 8, dtype=torch.long), "position_ids": torch.arange(8)[None]}
    assert whole(batch, 2)["position_ids"].tolist() == [list(range(8))] * 3


def test_positions_that_begin_late_are_kept() -> None:
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.long), "position_ids": torch.arange(5, 9)[None]}
    joined = whole(batch, 2)
    assert joined["position_ids"].tolist() == [[5, 6, 7, 8]]
    assert "documents" not in joined


def test_a_batch_of_padding_alone_keeps_its_shape_and_supervises_nothing() -> None:
    ids = torch.ones(2, 6, dtype=torch.long)
    joined = whole({"input_ids": ids, "labels": ids, "attention_mask": torch.zeros(2, 6)}, 4)
    assert joined["input_ids"].shape == (2, 8)
    assert targets(joined) == []
    assert joined["documents"].shape == (0, 3)


IDS = torch.ones(2, 6, dtype=torch.long)
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": IDS, "token_type_ids": IDS}, "'token_type_ids'.*Known keys"),
    ({"labels": IDS}, "needs `input_ids`"),
    ({"input_ids": IDS[0]}, "needs `input_ids`"),
    ({"input_ids": IDS[:, :0]}, "at least one token"),
    ({"input_ids": IDS, "labels": IDS[:, :5]}, r"`labels` is \(2, 5\), but `input_ids` is \(2, 6\)"),
    ({"input_ids": IDS, "attention_mask": IDS[:1]}, r"`attention_mask` is \(1, 6\)"),
    ({"input_ids": IDS, "attention_mask": IDS[:, None, None]}, "`attention_mask`"),
    ({"input_ids": IDS, "labels": [1, 2]}, "`labels` is list"),
    ({"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]] * 2)}, "zeros between ones"),
    (
        {"input_ids": IDS, "position_ids": torch.tensor([[0, 2, 4, 6, 8, 10]])},
        "neither count up by one nor restart",
    ),
]


@pytest.mark.parametrize(("batch", "message"), FAULTS, ids=lambda x: str(x)[:30])
def test_faults_are_refused(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_batch(batch, topology(2))
