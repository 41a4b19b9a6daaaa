"""`shard_batch`: from the whole batch to this rank's shard, with everything that needs the whole sequence done first.

Shapes: B batch, T tokens of the whole sequence, P ranks that share it, S = T / P tokens of a shard: see layout.py.

Targets are shifted, document borders found and positions counted before the cut, so that no shard edge shows
in the result. All of it happens once per batch, on the host; layers get the findings as keyword arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_ulysses.comm import Topology, same_on_all_ranks
from ds_ulysses.config import IGNORE_INDEX

KEYS = ("input_ids", "labels", "attention_mask", "position_ids")


class _Extent(NamedTuple):
    """Where the documents are. All tensors are [B, T] booleans but `positions`, which are integers."""

    real: Tensor
    starts: Tensor
    positions: Tensor


def shard_batch(batch: Mapping[str, Any], topology: Topology) -> dict[str, Any]:
    """Return what `model(**...)` takes on this rank. Every rank of a group passes the same whole batch.

    `batch`: `input_ids` [B, T]; optionally `labels` [B, T] (-100: not supervised), `attention_mask` [B, T] of 0 and 1
    (padding on either side), `position_ids` [B, T] or [1, T] (a restart at 0 begins a new document). Any T and B.
    Returns, on this rank's device, `input_ids`, `position_ids` and, given labels, `shift_labels`, each [B, S]; and
    `placement`, which says who holds which piece of which document: every layer is handed that one object.

    A position predicts only a real token of its own document: padding weighs nothing, and no target crosses from
    one document into the next. Raises `ValueError` for keys it does not know, for shapes that do not fit, and if the
    first batch is not the same on all ranks of the group.
    """
    tensors = _check(batch)
    if topology.num_batches == 0 and topology.sp_size > 1:
        _compare(tensors["input_ids"], topology)
    topology.num_batches += 1
    extent = _extent(tensors)
    columns = _used_columns(extent.real)
    extent = _Extent(*(x[:, columns] for x in extent))
    shards = {"input_ids": tensors["input_ids"][:, columns], "position_ids": extent.positions}
    if "labels" in tensors:
        shards["shift_labels"] = _shift(tensors["labels"][:, columns], extent)
    num_tokens = -(-extent.real.shape[1] // topology.sp_size) * topology.sp_size
    placement = topology.place(num_tokens, len(extent.real), _documents(extent, num_tokens))
    places = torch.from_numpy(placement.token_places()).expand(len(extent.real), -1).to(extent.real.device)
    shards = {
        key: _shard(x, num_tokens, places, IGNORE_INDEX if key == "shift_labels" else 0) for key, x in shards.items()
    }
    return {key: x.to(topology.device, non_blocking=True) for key, x in shards.items()} | {"placement": placement}


def _check(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    if unknown := sorted(set(batch) - set(KEYS)):
        raise ValueError(
            f"Batch key {', '.join(map(repr, unknown))}: how to shard it is not known, and to drop it could change "
            f"the result. Known keys: {', '.join(KEYS)}."
        )
    tensors = {key: value for key, value in batch.items() if value is not None}
    ids = tensors.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.numel() == 0:
        raise ValueError("A batch needs `input_ids`, a tensor of [batch, tokens] with at least one token.")
    for key, value in tensors.items():
        rows = {1, ids.shape[0]} if key == "position_ids" else {ids.shape[0]}
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if shape not in {(row, ids.shape[1]) for row in rows}:
            raise ValueError(f"`{key}` is {shape}, but `input_ids` is {tuple(ids.shape)}; they must have one shape.")
    return tensors


def _compare(ids: Tensor, topology: Topology) -> None:
    """A sampler that goes by the global rank feeds each rank another sequence, and the shards fit all the same."""
    places = torch.arange(1, ids.numel() + 1, device=ids.device)
    checksum = int((ids.flatten() * (places * 2654435761 % 1000003)).sum())
    if not same_on_all_ranks([*ids.shape, checksum], topology.sp_group, topology.device):
        raise ValueError(
            f"The ranks that share a sequence were given different batches. Shard the data by topology.dp_rank "
            f"({topology.dp_rank} of {topology.dp_size} here), not by the global rank ({topology.rank} here)."
        )


def _extent(tensors: Mapping[str, Tensor]) -> _Extent:
    """Find real tokens, the first token of each document, and every token's position."""
    ids = tensors["input_ids"]
    real = tensors.get("attention_mask", torch.ones_like(ids)).bool()
    opens = real & ~pad(real, (1, 0))[:, :-1]  # a real token after padding, or the first of the row
    positions = tensors.get("position_ids")
    if positions is None:
        if (opens.sum(dim=1) > 1).any():
            raise ValueError(
                "`attention_mask` has zeros between ones: attention over a gap is not supported. Pad on one side, or "
                "give `position_ids` that restart at 0 where a new document begins."
            )
        first = real.int().argmax(dim=1, keepdim=True)
        positions = (torch.arange(ids.shape[1], device=ids.device) - first).clamp(min=0)
        return _Extent(real, opens, positions)
    positions = positions.expand_as(ids)
    continues = pad(positions[:, 1:] == positions[:, :-1] + 1, (1, 0)) & ~opens
    starts = real & ~continues
    many = starts.sum(dim=1, keepdim=True) > 1
    if (starts & many & (positions != 0)).any():
        raise ValueError(
            "`position_ids` neither count up by one nor restart at 0: where documents begin is not clear. Give "
            "0, 1, 2, ... for each document."
        )
    return _Extent(real, starts, positions)


def _used_columns(real: Tensor) -> slice:
    """Columns from the first to the last that hold a real token in any row; all if none does."""
    used = real.any(dim=0).nonzero()
    return slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(None)


def _shift(labels: Tensor, extent: _Extent) -> Tensor:
    """Next-token targets [B, T]: unsupervised where this or the next token is padding or begins a document."""
    follows = pad((extent.real & ~extent.starts)[:, 1:], (0, 1))
    return pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).masked_fill(~(follows & extent.real), IGNORE_INDEX)


def _shard(x: Tensor, num_tokens: int, places: Tensor, fill: int) -> Tensor:
    """[B, T] -> the tokens at `places` [B, S], after filling T up to `num_tokens`."""
    return pad(x, (0, num_tokens - x.shape[1]), value=fill).gather(1, places)


def _documents(extent: _Extent, num_tokens: int) -> bytes | None:
    """Each document, packed; None if each row of `num_tokens` is one from end to end."""
    real, starts, _ = extent
    ends = real & ~pad((real & ~starts)[:, 1:], (0, 1))
    row, start = starts.nonzero(as_tuple=True)
    stop = ends.nonzero(as_tuple=True)[1] + 1
    if len(row) == len(real) and real.all() and real.shape[1] == num_tokens:
        return None
    return torch.stack([row, start, stop], dim=1).int().cpu().numpy().tobytes()
