"""Injection into a Hugging Face model.

`patch_model` gives each module that mixes tokens its mixer (see injectors.py) and makes the model's config name our
attention function, which is registered with transformers under a name of its own. The model gets a copy of its
config first, so another model that shares it is not touched. No mask function is registered: transformers then
builds no mask, and one that is passed in is refused, because padding and documents travel in the `placement`.

Hugging Face's shapes live here only: q [B, H, S, D] in, [B, S, H, E] out, for values of E channels.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedModel

from ds_ulysses.comm import Topology, same_on_all_ranks
from ds_ulysses.kernels import Mask
from ds_ulysses.loss import StepNormalizer
from ds_ulysses.mixers import DistributedAttention
from ds_ulysses.models import facts
from ds_ulysses.models.causal_lm import output_layer, replace_forwards, restore_forwards
from ds_ulysses.models.injectors import Place, find_places
from ds_ulysses.models.rope import DocumentRotary, length_dependent
from ds_ulysses.models.support import refuse_unsupported_model

ATTENTION_NAME = "ds_ulysses"
ATTRIBUTE = "_ds_ulysses_patch"
# What layers pass along that does not change attention as computed here.
HARMLESS = {"position_ids", "use_cache", "cache_position", "output_hidden_states", "output_router_logits", "is_causal"}


@dataclass
class Patch:
    """The changes made in a model, kept on it for `unpatch_model` and the engine."""

    model: PreTrainedModel
    topology: Topology
    attention_name: str
    normalizer: StepNormalizer = field(default_factory=StepNormalizer)
    places: dict[str, Place] = field(default_factory=dict)
    """Modules that have been given a mixer, by name."""
    rotaries: dict[nn.Module, DocumentRotary] = field(default_factory=dict)
    """Rotary modules that go by the length of each document, and what stands in for them."""
    handles: dict[str, RemovableHandle] = field(default_factory=dict)


def patch_model(model: nn.Module, topology: Topology) -> Patch:
    """Make the Hugging Face model in `model` train on sequence shards. Undone by `unpatch_model`.

    `model` may be the model itself or wrap it (PEFT, an outer module). A causal LM then takes what `shard_batch`
    returns and its loss is the mean over all ranks. Raises `ValueError`, with nothing changed, for a model that
    would not be exact, has no attention layer that can be patched, or is patched already.
    """
    inner = find_model(model)
    if hasattr(inner, ATTRIBUTE):
        raise ValueError("This model is patched already. Call unpatch_model first to change its topology.")
    refuse_unsupported_model(inner.config)
    places = find_places(inner)
    head = output_layer(inner)
    patch = Patch(inner, topology, inner.config._attn_implementation, places=places)
    _own_config(inner)._attn_implementation_internal = ATTENTION_NAME
    for place in places.values():
        place.inject(topology)
    patch.rotaries = {module: DocumentRotary(module) for module in inner.modules() if length_dependent(module)}
    for module, rotary in patch.rotaries.items():
        vars(module)["forward"] = rotary
    decoder = inner.base_model
    patch.handles["inputs"] = decoder.register_forward_pre_hook(partial(_begin_forward, patch), with_kwargs=True)
    patch.handles["exchanges"] = decoder.register_forward_hook(partial(_check_exchanges, patch))
    patch.handles["dropout"] = decoder.register_forward_pre_hook(partial(_check_dropout, patch))
    if head is not None:
        replace_forwards(inner, head, topology.config.logits_tile_size, patch.normalizer)
    setattr(inner, ATTRIBUTE, patch)
    return patch


def unpatch_model(model: nn.Module) -> None:
    """Give the model back its own attention and loss. Raises `ValueError` if it is not patched."""
    inner = find_model(model)
    patch: Patch | None = getattr(inner, ATTRIBUTE, None)
    if patch is None:
        raise ValueError("This model is not patched, so there is nothing to undo.")
    inner.config._attn_implementation_internal = patch.attention_name
    for place in patch.places.values():
        place.remove()
    for handle in patch.handles.values():
        handle.remove()
    for rotary in patch.rotaries:
        del vars(rotary)["forward"]
    restore_forwards(inner)
    delattr(inner, ATTRIBUTE)


def find_model(model: nn.Module) -> PreTrainedModel:
    """Find the one outermost Hugging Face model in `model`. Raises `ValueError` if there is none, or several."""
    found: dict[str, PreTrainedModel] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(outer + "." if outer else "") for outer in found)
        if isinstance(module, PreTrainedModel) and not inside:
            found[name] = module
    if len(found) != 1:
        names = ", ".join(name or type(m).__name__ for name, m in found.items()) or "none"
        raise ValueError(
            f"{type(model).__name__} must hold exactly one Hugging Face model to patch, but holds: {names}. "
            f"Pass the model to train."
        )
    return next(iter(found.values()))


def _own_config(model: PreTrainedModel) -> Any:
    """Give every module of this model that holds its config a copy, and return it."""
    shared, own = model.config, copy.copy(model.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own
    return own


def _attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls in each layer: [B, H, S, D] in, [B, S, H, E] out."""
    window, softcap = kwargs.pop("sliding_window", None), kwargs.pop("softcap", None)
    scale, placement, sinks = kwargs.pop("scaling", None), kwargs.pop("placement", None), kwargs.pop("s_aux", None)
    asked = [name for name, value in kwargs.items() if name not in HARMLESS and _is_set(value)]
    if attention_mask is not None:
        asked.append("a mask")
    if not (facts.is_bidirectional(module.config) or kwargs.get("is_causal", getattr(module, "is_causal", True))):
        asked.append("bidirectional attention")
    if asked:
        raise ValueError(
            f"Attention was asked for {', '.join(asked)}, which would be ignored here. Feed the model from shard_batch "
            f"and leave dropout and other extras of attention off."
        )
    scale = scale if scale is not None else query.shape[3] ** -0.5
    mask = Mask(scale, *facts.seen_distances(module.config, window), softcap or 0.0)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    attention: DistributedAttention = module.distributed_attention  # type: ignore[assignment]
    return attention(q, k, v, mask, placement, sinks), None


def _is_set(value: Any) -> bool:
    """Whether a keyword asks for anything: tensors do, None, False and 0 do not."""
    return isinstance(value, Tensor) or bool(value)


AttentionInterface.register(ATTENTION_NAME, _attention_forward)


def _begin_forward(
    patch: Patch, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Before the decoder: refuse what did not come from `shard_batch`, and keep no cache of keys and values."""
    if kwargs.get("position_ids") is None:
        raise ValueError(
            "position_ids are missing: each rank would count its shard from 0. Feed the model from shard_batch."
        )
    if kwargs.get("attention_mask") is not None:
        raise ValueError("attention_mask cannot be used on a shard. Pass it to shard_batch with the whole batch.")
    if kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None:
        raise ValueError("Generation with a cache is not sharded. Call unpatch_model, or generate from a saved model.")
    if patch.rotaries:
        rows, tokens = kwargs["position_ids"].shape
        placement = kwargs.get("placement") or patch.topology.place(tokens * patch.topology.sp_size)
        lengths = torch.from_numpy(placement.document_lengths(rows))
        for rotary in patch.rotaries.values():
            rotary.lengths = lengths
    return args, kwargs | {"use_cache": False}


def _check_dropout(patch: Patch, module: nn.Module, args: Any) -> None:
    """Before the first forward in training: shards of one sequence must not drop the same positions."""
    if not module.training:
        return
    patch.handles.pop("dropout").remove()
    layers = [name for name, m in patch.model.named_modules() if isinstance(m, nn.Dropout) and m.p]
    active, seed, topology = facts.dropouts(patch.model.config) or layers, torch.initial_seed(), patch.topology
    if topology.sp_size > 1 and active and same_on_all_ranks([seed % 2**31], topology.sp_group, topology.device):
        raise ValueError(
            f"Dropout is on ({active[0]}), but the random seed is {seed} on all ranks of a group: shards of a sequence "
            f"would drop the same positions. Call torch.manual_seed with another seed on each rank, after the weights "
            f"have been made."
        )


def _check_exchanges(patch: Patch, module: nn.Module, args: Any, output: Any) -> None:
    """After the first forward: every patched layer must have gone through its `DistributedAttention`."""
    patch.handles.pop("exchanges").remove()
    bypassed = [name for name, place in patch.places.items() if not place.mixer.has_mixed]
    if bypassed:
        raise ValueError(
            f"{len(bypassed)} of {len(patch.places)} attention layers attended within their shard only, first "
            f"{bypassed[0]}: something replaced the model's attention after it was patched. Patch it last."
        )
