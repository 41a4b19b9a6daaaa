"""Who sees whom does not depend on the ranks: change one token, and see which outputs change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import run_ranks
from tests.models import VOCAB, tiny_model
from tests.parity.architecture import WAYS, whole_logits

TOKENS = 15
"""Of a row: a multiple of no number of ranks but 1."""
WINDOW = 4
CASES: dict[str, tuple[str, dict[str, Any], list[tuple[int, int]]]] = {
    "causal": ("llama", {}, [(0, TOKENS)]),
    "packed": ("llama", {}, [(0, 9), (9, 10), (10, TOKENS)]),
    "left padding": ("llama", {}, [(4, TOKENS)]),
    "right padding": ("llama", {}, [(0, 11)]),
    "packed, then padding": ("llama", {}, [(0, 7), (7, 12)]),
    "window": ("mistral", {"sliding_window": WINDOW}, [(0, TOKENS)]),
    "window, packed": ("mistral", {"sliding_window": WINDOW}, [(0, 9), (9, 10), (10, TOKENS)]),
    "bidirectional": ("llama", {"is_causal": False}, [(0, TOKENS)]),
    "bidirectional, packed": ("llama", {"is_causal": False}, [(0, 9), (9, 10), (10, TOKENS)]),
    "bidirectional, left padding": ("llama", {"is_causal": False}, [(4, TOKENS)]),
}
"""Model, its settings, and the (start, stop) of the documents of a row; what is in none is padding."""


def perturbed(documents: list[tuple[int, int]]) -> dict[str, Tensor]:
    """A row as it is, and then one row for each token, in which that token is another."""
    ids = torch.randint(1, VOCAB // 2, (TOKENS,), generator=torch.Generator().manual_seed(0)).repeat(TOKENS + 1, 1)
    ids[torch.arange(TOKENS) + 1, torch.arange(TOKENS)] += VOCAB // 2
    mask, positions = (torch.zeros(TOKENS, dtype=torch.long) for _ in range(2))
    for start, stop in documents:
        mask[start:stop] = 1
        positions[start:stop] = torch.arange(stop - start)
    return {"input_ids": ids, "attention_mask": mask.expand_as(ids), "position_ids": positions.expand_as(ids)}


def should_see(kind: str, changes: dict[str, Any], documents: list[tuple[int, int]]) -> Tensor:
    """[i, j]: whether the output of token i depends on token j, through one layer; only real tokens count."""
    i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    seen = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for start, stop in documents:
        seen |= (i >= start) & (i < stop) & (j >= start) & (j < stop)
    if changes.get("is_causal", True):
        seen &= j <= i
    return seen & (i - j < changes.get("sliding_window", TOKENS))


def check(case: str) -> None:
    import ds_ulysses

    kind, changes, documents = CASES[case]
    model = tiny_model(kind, num_hidden_layers=1, **changes)
    real = torch.zeros(TOKENS, dtype=torch.bool)
    for start, stop in documents:
        real[start:stop] = True
    for block in WAYS.get(dist.get_world_size(), {"alone": {}}).values():
        config = {"sequence_parallel_size": dist.get_world_size(), "ds_ulysses": block}
        topology = ds_ulysses.Topology.create(ds_ulysses.SequenceParallelConfig.from_deepspeed(config))
        ds_ulysses.patch_model(model, topology)
        logits = whole_logits(model, ds_ulysses.shard_batch(perturbed(documents), topology), topology)
        ds_ulysses.unpatch_model(model)
        first = int(real.nonzero()[0])  # columns of padding only are not computed
        found = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
        width = min(logits.shape[1], TOKENS - first)
        found[first : first + width] = (logits[1:, :width] != logits[0, :width]).any(dim=2).T
        assert torch.equal(found & real[:, None] & real, should_see(kind, changes, documents)), (block, found.int())


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_who_sees_whom(case: str, world: int) -> None:
    run_ranks(check, world, case)
