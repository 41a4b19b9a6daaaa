"""Samples, and the order in which they are trained on.

The order is a function of the seed and the epoch alone. An optimizer step takes the next micro * accumulation * dp
samples, whatever the number of ranks that share a sequence. Where the last step of an epoch runs short, rows
without a target fill it: they weigh nothing, so no sample is repeated or dropped, and all ranks step alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from ds_ulysses.deepspeed_json import BatchSizes
from ds_ulysses.loss import IGNORE_INDEX
from train.chat import tokenize_chat

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def load_rows(name: str, split: str) -> Dataset:
    """Rows of a JSONL, JSON or parquet file, or of a dataset by name. Raises `ValueError`."""
    path = Path(name)
    if path.suffix in FORMATS:
        if not path.is_file():
            raise ValueError(f"There is no dataset file {name}.")
        try:
            return load_dataset(FORMATS[path.suffix], data_files=str(path), split="train")
        except Exception as error:  # datasets wraps a parser's complaint in a class of its own for each
            raise ValueError(f"Cannot read the dataset {name}: {error.__cause__ or error}") from error
    try:
        return load_dataset(name, split=split)
    except Exception as error:
        raise ValueError(
            f"Cannot load the dataset {name!r}, split {split!r}: {error}. Files end in {', '.join(FORMATS)}."
        ) from error


@dataclass
class Samples:
    """Tokenised samples, and what became of the rows."""

    rows: Dataset
    lengths: Tensor
    """Tokens of each sample, and a 0 at the end for index -1."""
    num_targets: Tensor
    """Supervised tokens, alike."""
    num_cut: int
    num_skipped: int
    """Rows without a supervised token, which teach nothing."""

    def __len__(self) -> int:
        return len(self.rows)


def load_samples(rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Samples:
    """Tokenise, cut and count. Raises `ValueError` if no row has a supervised token."""

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        sample = tokenize_chat(row, tokenizer, max_length + 1)
        cut = len(sample["input_ids"]) > max_length
        sample = {key: values[:max_length] for key, values in sample.items()}
        num_targets = sum(label != IGNORE_INDEX for label in sample["labels"][1:])
        return {**sample, "length": len(sample["input_ids"]), "num_targets": num_targets, "cut": cut}

    tokenized = rows.map(tokenize, remove_columns=rows.column_names, desc=None)
    kept = tokenized.filter(lambda row: row["num_targets"] > 0)
    if len(kept) == 0:
        raise ValueError(
            f"None of the {len(rows)} rows has a supervised token within {max_length} tokens: nothing would be learnt. "
            f"Raise --max_length, or check that the assistant says something."
        )
    lengths, num_targets = (torch.tensor([*kept[column], 0]) for column in ("length", "num_targets"))
    return Samples(kept, lengths, num_targets, sum(tokenized["cut"]), len(rows) - len(kept))


@dataclass
class StepPlan:
    """Which samples an optimizer step takes: indices [accumulation][dp][micro], -1 for a row without a sample."""

    epoch: float
    indices: Tensor


def plan_steps(num_samples: int, sizes: BatchSizes, dp_size: int, seed: int) -> Iterator[StepPlan]:
    """Epoch after epoch without end. `epoch` counts passes, the step included."""
    epoch = 0
    while True:
        order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch))
        for done, step in enumerate(order.split(sizes.train), start=1):
            filled = torch.full((sizes.train,), -1)
            filled[: len(step)] = step
            passed = epoch + min(done * sizes.train, num_samples) / num_samples
            yield StepPlan(passed, filled.view(sizes.accumulation, dp_size, sizes.micro))
        epoch += 1


def steps_per_epoch(num_samples: int, sizes: BatchSizes) -> int:
    """Optimizer steps of one pass; the last one may be short."""
    return -(-num_samples // sizes.train)


def collate(rows: Dataset, indices: Tensor) -> dict[str, Tensor]:
    """One micro-batch of one replica, padded on the right; -1 gives a row of one token without a target."""
    samples = [rows[i] if i >= 0 else {"input_ids": [0], "labels": [IGNORE_INDEX]} for i in indices.tolist()]

    def padded(values: list[list[int]], fill: int) -> Tensor:
        return pad_sequence([torch.tensor(v) for v in values], batch_first=True, padding_value=fill)

    return {
        "input_ids": padded([s["input_ids"] for s in samples], 0),
        "labels": padded([s["labels"] for s in samples], IGNORE_INDEX),
        "attention_mask": padded([[1] * len(s["input_ids"]) for s in samples], 0),
    }
