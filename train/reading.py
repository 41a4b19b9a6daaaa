"""Reading the data on many ranks: one of them tokenises, the others find the result in the cache of `datasets`."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ds_ulysses.topology import patient_group
from train.arguments import SftArguments
from train.data import Samples, Stream, count, load_rows, mix, tokenize

PATIENCE = timedelta(days=7)
"""How long ranks wait for the one that tokenises; the ordinary limit of a collective is minutes."""


def read_data(arguments: SftArguments, tokenizer: Any) -> Samples | Stream:
    """All datasets, tokenised and mixed. Collective. Raises `ValueError` on every rank if one of them does."""

    def mixed() -> Any:
        parts = [
            tokenize(load_rows(name, arguments.dataset_split, arguments.streaming), tokenizer, arguments.max_length)
            for name in arguments.dataset
        ]
        return mix(parts, arguments.dataset_weights, arguments.seed)

    if arguments.streaming:
        return Stream(mixed())
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    turn = 0 if dist.get_rank() == 0 else 1 if local_rank == 0 else 2
    return in_turns(lambda: count(mixed(), arguments.max_length), turn)


def in_turns(read: Callable[[], Samples], turn: int) -> Samples:
    """First rank 0, then the first rank of each machine, whose cache may be another, then all others."""
    group, samples = patient_group(PATIENCE), None
    for now in range(3):
        refusal = None
        if turn == now:
            try:
                samples = read()
            except ValueError as error:
                refusal = str(error)
        refusals: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(refusals, refusal, group=group)
        if found := next(filter(None, refusals), None):
            raise ValueError(found)
    dist.destroy_process_group(group)
    assert samples is not None
    return samples
