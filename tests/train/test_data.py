"""Rows to samples, and samples to steps."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from ds_ulysses.deepspeed_json import BatchSizes
from ds_ulysses.loss import IGNORE_INDEX
from tests.train.tokenizers import word_tokenizer
from train.data import collate, load_rows, load_samples, plan_steps, steps_per_epoch


def chat(answer: str, question: str = "hi") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_rows_without_a_target_are_counted_and_left_out() -> None:
    rows = Dataset.from_list([chat("one two"), chat("one", "a " * 30), chat("three")])
    samples = load_samples(rows, word_tokenizer(), 16)
    assert (len(samples), samples.num_skipped, samples.num_cut) == (2, 1, 1)
    assert samples.lengths.tolist() == [13, 12, 0]
    assert samples.num_targets.tolist() == [3, 2, 0]


def test_data_without_any_target_is_an_error() -> None:
    with pytest.raises(ValueError, match="None of the 1 rows has a supervised token within 4 tokens"):
        load_samples(Dataset.from_list([chat("one")]), word_tokenizer(), 4)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data{suffix}"
    rows = Dataset.from_list([chat("one"), chat("two")])
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        rows.to_parquet(path)
    assert load_rows(str(path), "train").to_list() == rows.to_list()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.jsonl", None, "no dataset file"),
        ("bad.jsonl", "{", "Cannot read the dataset"),
        ("not/a-name", None, "Cannot load the dataset 'not/a-name'"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_rows(str(path) if name.endswith("jsonl") else name, "train")


@given(st.integers(1, 20), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_each_epoch_has_each_sample_once(num_samples: int, micro: int, accumulation: int, dp: int) -> None:
    sizes = BatchSizes(micro * accumulation * dp, micro, accumulation)
    per_epoch = steps_per_epoch(num_samples, sizes)
    steps = list(islice(plan_steps(num_samples, sizes, dp, seed=0), 2 * per_epoch))
    orders = []
    for epoch in (steps[:per_epoch], steps[per_epoch:]):
        seen = [i for step in epoch for i in step.indices.flatten().tolist() if i >= 0]
        assert sorted(seen) == list(range(num_samples))
        orders.append(seen)
    assert steps[per_epoch - 1].epoch == 1.0
    assert steps[-1].epoch == 2.0
    assert all(step.indices.shape == (accumulation, dp, micro) for step in steps)
    if num_samples > 8:
        assert orders[0] != orders[1]


def test_a_step_takes_the_same_samples_however_it_is_spread() -> None:
    """8 samples of a step, as 8 micro-batches of one replica or one of 2 x 4."""
    ways = [(BatchSizes(8, 1, 8), 1), (BatchSizes(8, 4, 1), 2), (BatchSizes(8, 2, 2), 2)]
    plans = [next(plan_steps(50, sizes, dp, seed=3)).indices.flatten().tolist() for sizes, dp in ways]
    assert plans[0] == plans[1] == plans[2]


def test_eight_samples_on_two_replicas_with_accumulation_are_two_steps() -> None:
    assert steps_per_epoch(8, BatchSizes(train=4, micro=1, accumulation=2)) == 2


def test_collate_fills_with_rows_that_weigh_nothing() -> None:
    rows = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [IGNORE_INDEX, 6, 7]}])
    batch = collate(rows, torch.tensor([0, -1]))
    assert batch["input_ids"].tolist() == [[5, 6, 7], [0, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORE_INDEX, 6, 7], [IGNORE_INDEX] * 3]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
