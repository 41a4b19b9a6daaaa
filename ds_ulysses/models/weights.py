"""Weights of a model, counted by its config without making them."""

from __future__ import annotations

from typing import Any

from ds_ulysses.models import facts


def empty_model(config: Any) -> Any:
    """Make the model by its config, without weights."""
    import torch  # here, so that whoever only plans starts without it
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def num_weights(model: Any) -> int:
    """Count all weights of a model."""
    return sum(p.numel() for p in model.parameters())


def num_active_weights(model: Any) -> float:
    """Count the weights that a token is multiplied with: no embeddings, and of all experts those that it is sent to."""
    from torch import nn

    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    embeddings.discard(id(model.get_output_embeddings().weight))  # a tied one multiplies as the output layer
    per_token, num_experts = facts.experts(model.config)
    return sum(
        p.numel() * (per_token / num_experts if ".experts." in name else 1)
        for name, p in model.named_parameters()
        if p.dim() > 1 and not name.endswith("bias") and id(p) not in embeddings
    )
