"""Reading the data on many ranks: one of them tokenises, the others find the result in the cache of `datasets`."""

from __future__ import annotations

from typing import Any

from ds_ulysses.comm import in_turns, my_turn
from ds_ulysses.data import Samples, Stream, count, load_rows, mix, tokenize
from ds_ulysses.training.arguments import SftArguments


def read_data(arguments: SftArguments, tokenizer: Any) -> Samples | Stream:
    """Read what to train on: all datasets, tokenised and mixed. Collective. Raises `ValueError` on every rank."""

    def mixed() -> Any:
        parts = [
            tokenize(load_rows(name, arguments.dataset_split, arguments.streaming), tokenizer, arguments.max_length)
            for name in arguments.dataset
        ]
        return mix(parts, arguments.dataset_weights, arguments.seed)

    if arguments.streaming:
        return Stream(mixed())
    return in_turns(lambda: count(mixed(), arguments.max_length), my_turn())


def read_eval_data(arguments: SftArguments, tokenizer: Any) -> Samples | None:
    """Read what to evaluate on, if anything. Collective. Raises `ValueError` on every rank."""
    if not arguments.eval_dataset:
        return None

    def mixed() -> Samples:
        rows = [load_rows(name, arguments.eval_dataset_split) for name in arguments.eval_dataset]
        parts = [tokenize(part, tokenizer, arguments.max_length) for part in rows]
        return count(mix(parts, None, arguments.seed), arguments.max_length)

    return in_turns(mixed, my_turn())
