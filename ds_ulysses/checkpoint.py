"""Saving what was trained as an ordinary Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import torch.distributed as dist
from torch import Tensor

from ds_ulysses.engine import SequenceParallelEngine
from ds_ulysses.patch import find_model


def save_pretrained(engine: SequenceParallelEngine, folder: str | Path) -> None:
    """Write weights, config and generation config, for `from_pretrained`. Collective: every rank calls it.

    Under ZeRO-3 all ranks gather one parameter after the other; only the first rank keeps and writes them. Raises
    `ValueError` for a model with adapters, whose weights have names that `from_pretrained` does not know.
    """
    if any(hasattr(module, "peft_config") for module in engine.module.modules()):
        raise ValueError("A model with adapters cannot be saved as a whole yet. Merge them first, or save the adapter.")
    model = find_model(engine.module)
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            if engine.topology.rank == 0:
                state[name] = parameter.detach().cpu().clone()
    if engine.topology.rank == 0:
        saved = model.state_dict().keys()
        state |= {name: buffer.cpu() for name, buffer in model.named_buffers() if name in saved}
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()
