"""Work that ranks do one after another, or one for all, while the others wait as long as it takes."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

PATIENCE = timedelta(days=7)
"""How long ranks wait for the one that works; the ordinary limit of a collective is minutes."""
Result = TypeVar("Result")


def patient_group() -> ProcessGroup:
    """Make a group of all ranks on the CPU, to wait longer than a collective of training may take. Collective."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def my_turn() -> int:
    """Return 0 on rank 0, 1 on the first rank of each other machine, whose disks may be others, 2 on all others."""
    return 0 if dist.get_rank() == 0 else 1 if os.environ.get("LOCAL_RANK", "0") == "0" else 2


def in_turns(work: Callable[[], Result], turn: int) -> Result:
    """Run work turn after turn, from 0 to 2. Collective. Raises `ValueError` on every rank if one of them does."""
    group = patient_group()
    results: list[Result] = []
    for now in range(3):
        refusal = None
        if turn == now:
            try:
                results.append(work())
            except ValueError as error:
                refusal = str(error)
        refusals: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(refusals, refusal, group=group)
        if found := next(filter(None, refusals), None):
            raise ValueError(found)
    dist.destroy_process_group(group)
    return results[0]


def once(work: Callable[[], None]) -> None:
    """Run work on rank 0 alone. Collective, and raises as `in_turns` does."""
    rank = dist.get_rank()
    in_turns(work if rank == 0 else lambda: None, min(rank, 1))
