"""Injection into a Hugging Face model: the only file that imports transformers.

`patch_model` gives each attention layer a `DistributedAttention` and makes the model's config name our
attention function, which is registered with transformers under a name of its own. The model gets a copy of its
config first, so another model that shares it is not touched. No mask function is registered: transformers then
builds no mask, and one that is passed in is refused, because padding and documents travel as `documents`.

Hugging Face's shapes live here only: q [B, H, S, D] in, [B, S, H, D] out.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ds_ulysses.attention.distributed import DistributedAttention
from ds_ulysses.kernels import Mask
from ds_ulysses.loss import StepNormalizer, causal_lm_loss, tiled_cross_entropy
from ds_ulysses.support import refuse_unsupported_model
from ds_ulysses.topology import Topology

ATTENTION_NAME = "ds_ulysses"
ATTRIBUTE = "_ds_ulysses_patch"
# What layers pass along that does not change attention as computed here.
HARMLESS = {"position_ids", "use_cache", "cache_position", "output_hidden_states", "is_causal"}


@dataclass
class Patch:
    """What was changed in a model, kept on it for `unpatch_model` and the engine."""

    model: PreTrainedModel
    topology: Topology
    attention_name: str
    normalizer: StepNormalizer = field(default_factory=StepNormalizer)
    layers: dict[str, nn.Module] = field(default_factory=dict)
    handles: list[RemovableHandle] = field(default_factory=list)


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
    layers = _attention_layers(inner)
    head = _output_layer(inner)
    patch = Patch(inner, topology, inner.config._attn_implementation, layers=layers)
    _own_config(inner)._attn_implementation_internal = ATTENTION_NAME
    for layer in layers.values():
        layer.distributed_attention = DistributedAttention(kernel=topology.config.kernel, topology=topology)
    decoder = inner.base_model
    patch.handles.append(decoder.register_forward_pre_hook(_check_inputs, with_kwargs=True))
    patch.handles.append(decoder.register_forward_hook(partial(_check_exchanges, patch)))  # last: it removes itself
    if head is not None:
        vars(head)["forward"] = partial(_head_forward, head.forward, head, topology.config.logits_tile_size)
        vars(inner)["forward"] = partial(_causal_lm_forward, inner.forward, patch)
    setattr(inner, ATTRIBUTE, patch)
    return patch


def unpatch_model(model: nn.Module) -> None:
    """Give the model back its own attention and loss. Raises `ValueError` if it is not patched."""
    inner = find_model(model)
    patch: Patch | None = getattr(inner, ATTRIBUTE, None)
    if patch is None:
        raise ValueError("This model is not patched, so there is nothing to undo.")
    inner.config._attn_implementation_internal = patch.attention_name
    for layer in patch.layers.values():
        del layer.distributed_attention
    for handle in patch.handles:
        handle.remove()
    for module in (inner, inner.get_output_embeddings()):
        if module is not None:
            vars(module).pop("forward", None)
    delattr(inner, ATTRIBUTE)


def find_model(model: nn.Module) -> PreTrainedModel:
    """The one outermost Hugging Face model in `model`. Raises `ValueError` if there is none, or several."""
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


def _attention_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    layers = {name: m for name, m in model.named_modules() if hasattr(m, "layer_idx") and hasattr(m, "is_causal")}
    expected = model.config.num_hidden_layers
    if len(layers) != expected:
        raise ValueError(
            f"{type(model).__name__} has {expected} layers, but {len(layers)} attention modules that can be patched, "
            f"so some would attend within their shard only. Use the architecture's own transformers class."
        )
    return layers


def _output_layer(model: PreTrainedModel) -> nn.Linear | None:
    """The output layer of a causal LM, or None for a bare decoder, whose user brings a loss."""
    head = model.get_output_embeddings()
    if head is None:
        return None
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(
            f"The output layer of {type(model).__name__} is {head!r}: the tiled loss needs a plain nn.Linear without "
            f"bias. Leave it out of adapters."
        )
    return head


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
    """The function that transformers calls in each layer: [B, H, S, D] in, [B, S, H, D] out."""
    window, softcap = kwargs.pop("sliding_window", None), kwargs.pop("softcap", None)
    scale, documents, sinks = kwargs.pop("scaling", None), kwargs.pop("documents", None), kwargs.pop("s_aux", None)
    asked = [name for name, value in kwargs.items() if name not in HARMLESS and _is_set(value)]
    if attention_mask is not None:
        asked.append("a mask")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        asked.append("bidirectional attention")
    if asked:
        raise ValueError(
            f"Attention was asked for {', '.join(asked)}, which would be ignored here. Feed the model from shard_batch "
            f"and leave dropout and other extras of attention off."
        )
    mask = Mask(
        scale=scale if scale is not None else query.shape[3] ** -0.5,
        left=-1 if window is None else window - 1,
        softcap=softcap or 0.0,
    )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return _attention_of(module)(q, k, v, mask, documents, sinks), None


def _is_set(value: Any) -> bool:
    """Whether a keyword asks for anything: tensors do, None, False and 0 do not."""
    return isinstance(value, Tensor) or bool(value)


def _attention_of(layer: nn.Module) -> DistributedAttention:
    attention = layer.distributed_attention
    assert isinstance(attention, DistributedAttention)
    return attention


AttentionInterface.register(ATTENTION_NAME, _attention_forward)


def _check_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before the decoder: refuse what did not come from `shard_batch`, and keep no cache of keys and values."""
    if kwargs.get("position_ids") is None:
        raise ValueError(
            "position_ids are missing: each rank would count its shard from 0. Feed the model from shard_batch."
        )
    if kwargs.get("attention_mask") is not None:
        raise ValueError("attention_mask cannot be used on a shard. Pass it to shard_batch with the whole batch.")
    if kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None:
        raise ValueError("Generation with a cache is not sharded. Call unpatch_model, or generate from a saved model.")
    return args, kwargs | {"use_cache": False}


def _check_exchanges(patch: Patch, module: nn.Module, args: Any, output: Any) -> None:
    """After the first forward: every patched layer must have gone through its `DistributedAttention`."""
    patch.handles.pop().remove()
    bypassed = [name for name, layer in patch.layers.items() if not _attention_of(layer).has_exchanged]
    if bypassed:
        raise ValueError(
            f"{len(bypassed)} of {len(patch.layers)} attention layers attended within their shard only, first "
            f"{bypassed[0]}: something replaced the model's attention after it was patched. Patch it last."
        )


def _head_forward(
    original: Any, head: nn.Linear, tile_size: int, hidden: Tensor, targets: Tensor | None = None
) -> Tensor:
    """In place of the output layer's forward: logits without targets, the sum of the token losses with them.

    The loss is taken inside this module's call because that is where ZeRO-3 has gathered its weight.
    """
    if targets is None:
        logits: Tensor = original(hidden)
        return logits
    return tiled_cross_entropy(hidden, head.weight, targets, tile_size)


def _causal_lm_forward(original: Any, patch: Patch, *args: Any, **kwargs: Any) -> Any:
    """In place of a causal LM's forward: with `shift_labels`, the loss over all ranks and no logits."""
    if kwargs.pop("labels", None) is not None:
        raise ValueError("labels would be shifted inside the shard. Pass them to shard_batch with the whole batch.")
    targets = kwargs.pop("shift_labels", None)
    if targets is None:
        return original(*args, **kwargs)
    decoder, head = patch.model.base_model, patch.model.get_output_embeddings()
    output = decoder(*args, **kwargs)
    local_sum = head(output.last_hidden_state, targets)
    loss = causal_lm_loss(local_sum, targets, patch.normalizer)
    return CausalLMOutputWithPast(loss=loss, hidden_states=output.hidden_states)
