"""Samples: from files or datasets by name, read at once or as a stream, mixed, tokenised, and put into batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets, load_dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from ds_ulysses.config import IGNORE_INDEX
from ds_ulysses.data.chat import Sample, tokenize_chat
from ds_ulysses.data.steps import Document

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
SHUFFLE_BUFFER = 1000
"""Samples of a stream among which the next one is drawn."""
EMPTY: Sample = {"input_ids": [0], "labels": [IGNORE_INDEX]}
"""In place of a micro-batch without a sample: a token that weighs nothing."""


def load_rows(name: str, split: str, streaming: bool = False) -> Any:
    """Load the rows of a JSONL, JSON or parquet file, or of a dataset by name. Raises `ValueError`."""
    path = Path(name)
    try:
        if path.suffix not in FORMATS:
            rows = load_dataset(name, split=split, streaming=streaming)
        elif path.is_file():
            rows = load_dataset(FORMATS[path.suffix], data_files=str(path), split="train", streaming=streaming)
        else:
            raise ValueError("there is no such file")
        if next(iter(rows), None) is None:
            raise ValueError("it has no row")
    except Exception as error:  # datasets wraps a parser's complaint in a class of its own for each
        raise ValueError(
            f"Cannot read the dataset {name!r}, split {split!r}: {error.__cause__ or error}. Files end in "
            f"{', '.join(FORMATS)}."
        ) from error
    return rows


def tokenize(rows: Any, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Any:
    """Make rows of `input_ids`, `labels`, `length`, `num_targets` and whether they were `cut`; of a stream, lazily."""

    def tokenized(row: dict[str, Any]) -> dict[str, Any]:
        sample = tokenize_chat(row, tokenizer, max_length + 1)
        cut = len(sample["input_ids"]) > max_length
        sample = {key: values[:max_length] for key, values in sample.items()}
        num_targets = sum(label != IGNORE_INDEX for label in sample["labels"][1:])
        return {**sample, "length": len(sample["input_ids"]), "num_targets": num_targets, "cut": cut}

    names = rows.column_names or list(next(iter(rows)))  # a stream may not know its columns yet
    return rows.map(tokenized, remove_columns=names)


@dataclass
class Samples:
    """The tokenised samples, and what became of the rows."""

    rows: Dataset
    ids: Tensor
    """Which row each sample is; those that teach nothing are none."""
    lengths: Tensor
    """Tokens of each sample."""
    num_targets: Tensor
    """Supervised tokens of each."""
    num_cut: int
    num_skipped: int
    """Rows without a supervised token, which teach nothing."""

    def __len__(self) -> int:
        return len(self.ids)

    def documents(self, epoch: int, seed: int) -> Iterator[Document]:
        """Return all samples, in an order that depends on the seed and the epoch alone."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed + epoch))
        return map(Document, *(facts[order].tolist() for facts in (self.ids, self.lengths, self.num_targets)))

    def fetch(self, document: Document) -> Sample:
        """Return the sample of a document."""
        row: Sample = self.rows[document.id]
        return row


@dataclass
class Stream:
    """Samples that are read and tokenised as they are needed, by every rank alike."""

    rows: IterableDataset

    def documents(self, epoch: int, seed: int) -> Iterator[Document]:
        """Yield samples with a supervised token, shuffled as they come; an order of the seed and the epoch alone."""
        rows = self.rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        rows.set_epoch(epoch)
        for index, row in enumerate(rows):
            if row["num_targets"] > 0:
                yield Document(index, row["length"], row["num_targets"], {key: row[key] for key in EMPTY})

    def fetch(self, document: Document) -> Sample:
        """Return the tokens that were read with a document."""
        tokens: Sample = document.tokens
        return tokens


def mix(parts: Sequence[Any], weights: Sequence[float] | None, seed: int) -> Any:
    """Mix several into one: one after another, or drawn by weight until each has been used up once."""
    if weights is None:
        return concatenate_datasets(list(parts)) if len(parts) > 1 else parts[0]
    probabilities = [weight / sum(weights) for weight in weights]
    return interleave_datasets(list(parts), probabilities=probabilities, seed=seed, stopping_strategy="all_exhausted")


def count(tokenized: Dataset, max_length: int) -> Samples:
    """Leave out what teaches nothing. Raises `ValueError` if that is everything."""
    lengths, num_targets = (torch.tensor(tokenized[column][:]) for column in ("length", "num_targets"))
    ids = num_targets.nonzero().flatten()
    if len(ids) == 0:
        raise ValueError(
            f"None of the {len(tokenized)} rows has a supervised token within {max_length} tokens: nothing would be "
            f"learnt. Raise --max_length, or check that the assistant says something."
        )
    num_cut, num_skipped = sum(tokenized["cut"][:]), len(tokenized) - len(ids)
    return Samples(tokenized, ids, lengths[ids], num_targets[ids], num_cut, num_skipped)


def collate(samples: Sequence[Sample], flat: bool) -> dict[str, Tensor]:
    """Build a micro-batch of a replica: rows padded on the right, or all in one row, told apart by their positions."""
    samples = samples or [EMPTY]
    if flat:
        ids, labels = (torch.tensor([x for sample in samples for x in sample[key]])[None] for key in EMPTY)
        positions = torch.cat([torch.arange(len(sample["input_ids"])) for sample in samples])[None]
        return {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {
        "input_ids": _padded((s["input_ids"] for s in samples), 0),
        "labels": _padded((s["labels"] for s in samples), IGNORE_INDEX),
        "attention_mask": _padded(([1] * len(s["input_ids"]) for s in samples), 0),
    }


def _padded(rows: Iterable[list[int]], fill: int) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=fill)
