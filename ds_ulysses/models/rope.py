"""Rotary embeddings whose frequencies depend on the length of the sequence: each document goes by its own.

`longrope` switches to other factors beyond the length of pretraining (arXiv:2402.13753) and `dynamic` NTK scaling grows
its base with the length. In one process both go by the longest row of the batch, so that a sample's result depends on
what it is batched or packed with; on a shard they would go by the positions that happen to be there. Here a document
gets the embedding that it has alone, wherever it is cut and whatever it is packed with.

Shapes: B rows, S tokens of this rank's shard, R rotary channels.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

LENGTH_DEPENDENT = ("dynamic", "longrope")


class DocumentRotary:
    """A stand-in for the forward of a rotary module of a type in `LENGTH_DEPENDENT`, for some or all of its layers."""

    def __init__(self, module: nn.Module) -> None:
        # A call changes the module's frequencies for later calls: keep them as they were made.
        self.pristine = copy.deepcopy(module)
        self.lengths: Tensor | None = None
        """[B, S] on the CPU: tokens of the document that each token is in; set before each forward of the model."""

    @torch.compiler.disable
    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """cos and sin [B, S, R], as the module itself gives them for one document of each length."""
        assert self.lengths is not None, "the model's forward sets the lengths first"
        classes = self._classes(self.lengths)
        shortest, *longer = classes.unique().tolist()
        found = self._alone(shortest, x, position_ids, *args, **kwargs)
        for length in longer:
            here = (classes == length).to(x.device, non_blocking=True)[..., None]
            found = torch.where(here, self._alone(length, x, position_ids, *args, **kwargs), found)
        return found[0], found[1]

    def _alone(self, length: int, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[2, B, S, R]: cos and sin for documents of this length; what it gives to longer ones is not meant.

        The module takes the largest position for the length: one more position says it, and larger ones are cut.
        """
        fresh = copy.deepcopy(self.pristine).to(x.device)
        positions = pad(position_ids.clamp(max=length - 1), (0, 1), value=length - 1)
        return torch.stack(fresh(x, positions, *args, **kwargs))[:, :, :-1]

    def _classes(self, lengths: Tensor) -> Tensor:
        """One length of all that are treated alike: those before anything changes, and those after everything has."""
        config: Any = self.pristine.config
        nested = [value for value in config.rope_parameters.values() if isinstance(value, dict)]
        kinds = nested or [config.rope_parameters]
        starts = [int(p.get("original_max_position_embeddings") or config.max_position_embeddings) for p in kinds]
        lengths = lengths.clamp(min=min(starts))
        if any(p.get("rope_type") == "dynamic" for p in kinds):
            return lengths
        return torch.where(lengths > max(starts), lengths.max(), lengths)


def length_dependent(module: nn.Module) -> bool:
    """Say whether this is a rotary module of a type in `LENGTH_DEPENDENT`; some have one type per kind of layer."""
    kinds = getattr(module, "rope_type", None)
    return any(kind in LENGTH_DEPENDENT for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))
