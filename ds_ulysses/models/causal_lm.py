"""The forward of a patched causal LM: from a shard to the loss over all ranks, without ever holding its logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from ds_ulysses.loss import LogitsTransform, Routing, StepNormalizer, causal_lm_loss, route, tiled_cross_entropy
from ds_ulysses.models import facts
from ds_ulysses.placement import Placement


def output_layer(model: PreTrainedModel) -> nn.Linear | None:
    """Find the output layer of a causal LM; None for a bare decoder, whose user brings a loss. Raises `ValueError`."""
    head = model.get_output_embeddings()
    if head is None:
        return None
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(
            f"The output layer of {type(model).__name__} is {head!r}: the tiled loss needs a plain nn.Linear without "
            f"bias. Leave it out of adapters."
        )
    return head


def replace_forwards(model: PreTrainedModel, head: nn.Linear, tile_size: int, normalizer: StepNormalizer) -> None:
    """Give the model and its output layer the forwards below. Undone by `restore_forwards`."""
    transform = LogitsTransform(*facts.logits_scale_and_cap(model.config))
    vars(head)["forward"] = partial(_head, head.forward, head, tile_size, transform)
    vars(model)["forward"] = partial(_causal_lm, model.forward, model, normalizer)


def restore_forwards(model: PreTrainedModel) -> None:
    """Give the model back what its class does."""
    for module in (model, model.get_output_embeddings()):
        if module is not None:
            vars(module).pop("forward", None)


def _head(
    original: Any,
    head: nn.Linear,
    tile_size: int,
    transform: LogitsTransform,
    hidden: Tensor,
    targets: Tensor | None = None,
) -> Tensor:
    """Logits without targets, the sum of the token losses with them.

    The loss is taken inside this module's call because that is where ZeRO-3 has gathered its weight.
    """
    if targets is None:
        logits: Tensor = original(hidden)
        return logits
    return tiled_cross_entropy(hidden, head.weight, targets, tile_size, transform)


def _causal_lm(original: Any, model: PreTrainedModel, normalizer: StepNormalizer, *args: Any, **kwargs: Any) -> Any:
    """With `shift_labels`, the loss over all ranks and no logits; otherwise what the model does."""
    if kwargs.pop("labels", None) is not None:
        raise ValueError("labels would be shifted inside the shard. Pass them to shard_batch with the whole batch.")
    targets = kwargs.pop("shift_labels", None)
    if targets is None:
        return original(*args, **kwargs)
    routes = facts.routes(model.config)
    asked = {"output_router_logits": True} if routes else {}
    output = model.base_model(*args, **kwargs, **asked)
    local_sum = model.get_output_embeddings()(output.last_hidden_state, targets)
    routing = _routing(model, output.router_logits, targets, kwargs.get("placement")) if routes else None
    loss, auxiliary = causal_lm_loss(local_sum, targets, normalizer, routing)
    return MoeCausalLMOutputWithPast(loss=loss, aux_loss=auxiliary, hidden_states=output.hidden_states)


def _routing(model: Any, logits: tuple[Tensor, ...], targets: Tensor, placement: Placement | None) -> Routing:
    """What the real tokens of this shard did; padding is routed too, but does not count."""
    real = None
    if placement is not None and placement.packed:
        lengths = torch.from_numpy(placement.document_lengths(targets.shape[0]))
        real = (lengths > 0).flatten().to(targets.device, non_blocking=True)
    return route(logits, model.num_experts_per_tok, model.router_aux_loss_coef, real)
