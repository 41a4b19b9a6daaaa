"""Rows to samples, from files and streams, one or several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from datasets import Dataset

from ds_ulysses.config.constants import IGNORE_INDEX
from ds_ulysses.data.samples import Samples, Stream, collate, count, load_rows, mix, tokenize
from tests.tokenizers import word_tokenizer


def chat(answer: str, question: str = "hi") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def samples_of(rows: Dataset, max_length: int = 16) -> Samples:
    return count(tokenize(rows, word_tokenizer(), max_length), max_length)


def test_rows_without_a_target_are_counted_and_left_out() -> None:
    samples = samples_of(Dataset.from_list([chat("one two"), chat("one", "a " * 30), chat("three")]))
    assert (len(samples), samples.num_skipped, samples.num_cut) == (2, 1, 1)
    assert samples.lengths.tolist() == [13, 12]
    assert samples.num_targets.tolist() == [3, 2]
    documents = sorted(samples.documents(0, 0))
    assert [document.id for document in documents] == [0, 2], "they go by their rows"
    assert [len(samples.fetch(document)["input_ids"]) for document in documents] == [13, 12]


def test_data_without_any_target_is_an_error() -> None:
    with pytest.raises(ValueError, match="None of the 1 rows has a supervised token within 4 tokens"):
        samples_of(Dataset.from_list([chat("one")]), 4)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_files(tmp_path: Path, suffix: str, streaming: bool) -> None:
    path = tmp_path / f"data{suffix}"
    rows = Dataset.from_list([chat("one"), chat("two")])
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        rows.to_parquet(path)
    assert list(load_rows(str(path), "train", streaming)) == rows.to_list()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.jsonl", None, "none.jsonl', split 'train': there is no such file"),
        ("bad.jsonl", "{", "bad.jsonl', split 'train': JSON parse error"),
        ("empty.parquet", "", "Cannot read the dataset"),
        ("empty.jsonl", "\n", "Cannot read the dataset"),
        ("not/a-name", None, "Cannot read the dataset 'not/a-name', split 'train': .*Files end in .jsonl"),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, message: str, streaming: bool
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # which is not tried again and again
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_rows(str(path) if path.suffix else name, "train", streaming)


def test_documents_are_ordered_by_seed_and_epoch_alone() -> None:
    samples = samples_of(Dataset.from_list([chat("one " * i) for i in range(1, 40)]), 64)
    orders = {(epoch, seed): list(samples.documents(epoch, seed)) for epoch in (0, 1) for seed in (0, 7)}
    assert list(samples.documents(1, 7)) == orders[1, 7]
    for order in orders.values():
        assert sorted(d.id for d in order) == list(range(39))
        for document in order:
            sample = samples.fetch(document)
            assert len(sample["input_ids"]) == document.length
            assert sum(label != IGNORE_INDEX for label in sample["labels"][1:]) == document.num_targets
    assert len({tuple(d.id for d in order) for order in orders.values()}) == 4


def test_a_stream_gives_what_the_data_set_would(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(chat("one " * (i % 5), "two " * i)) + "\n" for i in range(30)))
    whole = count(tokenize(load_rows(str(path), "train"), word_tokenizer(), 24), 24)
    stream = Stream(tokenize(load_rows(str(path), "train", streaming=True), word_tokenizer(), 24))
    documents = list(stream.documents(0, 3))
    assert documents == list(stream.documents(0, 3))
    assert [d.id for d in documents] != [d.id for d in stream.documents(1, 3)] or documents != list(
        stream.documents(1, 3)
    )
    assert sorted(stream.fetch(d)["input_ids"] for d in documents) == sorted(
        whole.fetch(d)["input_ids"] for d in whole.documents(0, 0)
    )
    assert all(d.num_targets > 0 and d.length == len(stream.fetch(d)["input_ids"]) for d in documents)


def test_several_datasets_one_after_another_or_by_weight() -> None:
    parts = [Dataset.from_list([{"id": i} for i in ids]) for ids in (range(10), range(100, 400))]
    assert sorted(mix(parts, None, 0)["id"]) == [*range(10), *range(100, 400)]
    drawn = mix(parts, [1.0, 3.0], 0)["id"][:]
    assert drawn == mix(parts, [1.0, 3.0], 0)["id"][:]
    assert drawn != mix(parts, [1.0, 3.0], 1)["id"][:]
    assert {*range(10), *range(100, 400)} == set(drawn), "the larger one is used up, the smaller one repeated"
    assert sum(id < 10 for id in drawn) / len(drawn) == pytest.approx(0.25, abs=0.06)
    streams = [part.to_iterable_dataset() for part in parts]
    assert [row["id"] for row in mix(streams, [1.0, 3.0], 0)] == drawn
    assert sorted(row["id"] for row in mix(streams, None, 0)) == [*range(10), *range(100, 400)]


def test_collate_in_padded_rows() -> None:
    batch = collate(
        [{"input_ids": [5, 6, 7], "labels": [IGNORE_INDEX, 6, 7]}, {"input_ids": [8], "labels": [8]}], False
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORE_INDEX, 6, 7], [8, IGNORE_INDEX, IGNORE_INDEX]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_collate_in_one_row() -> None:
    batch = collate([{"input_ids": [5, 6, 7], "labels": [IGNORE_INDEX, 6, 7]}, {"input_ids": [8], "labels": [8]}], True)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8]]
    assert batch["labels"].tolist() == [[IGNORE_INDEX, 6, 7, 8]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0]]


@pytest.mark.parametrize("flat", [False, True])
def test_a_micro_batch_without_a_sample_is_a_token_that_weighs_nothing(flat: bool) -> None:
    batch = collate([], flat)
    assert (batch["input_ids"].tolist(), batch["labels"].tolist()) == ([[0]], [[IGNORE_INDEX]])
