"""Saving what was trained as an ordinary Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist
from torch import Tensor, nn

from ds_ulysses.engine import SequenceParallelEngine
from ds_ulysses.patch import find_model


def save_pretrained(engine: SequenceParallelEngine, folder: str | Path) -> None:
    """Write weights, config and generation config, for `from_pretrained`. Collective: every rank calls it.

    Of a model that peft wraps, its adapter alone is written, as peft does. Under ZeRO-3 all ranks gather one parameter
    after the other; only the first rank keeps and writes them. Raises `ValueError` for adapters inside another model.
    """
    model = _savable(engine.module)
    state: dict[str, Tensor] = {}
    for name, parameter in _saved_parameters(model):
        with deepspeed.zero.GatheredParameters([parameter]):
            if engine.topology.rank == 0:
                state[name] = parameter.detach().cpu().clone()
    if engine.topology.rank == 0:
        saved = model.state_dict().keys()
        state |= {name: buffer.cpu() for name, buffer in model.named_buffers() if name in saved}
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()


def _saved_parameters(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """All; or those of an adapter and the embeddings, of which peft writes the ones that were resized."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    embeddings = {id(p) for layer in layers if layer is not None for p in layer.parameters()}
    for name, parameter in model.named_parameters():
        if not hasattr(model, "peft_config") or parameter.requires_grad or id(parameter) in embeddings:
            yield name, parameter


def _savable(module: nn.Module) -> Any:
    """peft's wrapper if there is one, else the Hugging Face model."""
    wrapper = next((m for m in module.modules() if hasattr(m, "peft_config")), None)
    if wrapper is None:
        return find_model(module)
    if not hasattr(wrapper, "get_base_model"):
        raise ValueError(
            "The model has adapters, but peft does not wrap it, so which of its weights to write is not known. "
            "Add them with peft.get_peft_model."
        )
    return wrapper
