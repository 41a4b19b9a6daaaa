"""Saving what was trained as an ordinary Hugging Face folder, and the state of training as DeepSpeed's files."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT, PARAM
from torch import Tensor, nn

from ds_ulysses.engine.engine import SequenceParallelEngine
from ds_ulysses.models import find_model

STATE = "state"
UNIVERSAL = "universal"
"""Folders of a checkpoint: as it was saved, and cut up so that any number of ranks can read it."""


def save_pretrained(engine: SequenceParallelEngine, folder: str | Path) -> None:
    """Write weights, config and generation config, for `from_pretrained`. Collective: every rank calls it.

    Of a model that peft wraps, its adapter alone is written, as peft does. Under ZeRO-3 all ranks gather one parameter
    after the other; only the first rank keeps and writes them. Raises `ValueError` for adapters inside another model.
    """
    model = _savable(engine.module)
    engine.empty_partition_cache()  # ZeRO-3 may have weights on their way for a step that does not come
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
        if not _has_adapter(model) or parameter.requires_grad or id(parameter) in embeddings:
            yield name, parameter


def _has_adapter(module: nn.Module) -> bool:
    return hasattr(module, "peft_config")


def _savable(module: nn.Module) -> Any:
    """peft's wrapper if there is one, else the Hugging Face model."""
    wrapper = next(filter(_has_adapter, module.modules()), None)
    if wrapper is None:
        return find_model(module)
    if not hasattr(wrapper, "get_base_model"):
        raise ValueError(
            "The model has adapters, but peft does not wrap it, so which of its weights to write is not known. "
            "Add them with peft.get_peft_model."
        )
    return wrapper


def save_state(engine: SequenceParallelEngine, folder: str | Path) -> None:
    """Write weights, optimizer and schedule into `folder`/state. Collective; call it between optimizer steps.

    Of a model with an adapter the frozen weights are left out, as the base model has them.
    """
    has_adapter = _has_adapter(_savable(engine.module))
    engine.save_checkpoint(str(folder), tag=STATE, save_latest=False, exclude_frozen_parameters=has_adapter)


def load_state(engine: SequenceParallelEngine, folder: str | Path) -> None:
    """Read what `save_state` wrote, on as many ranks and at the same ZeRO stage. Collective.

    Otherwise `make_universal` comes first, and the engine's JSON says `"checkpoint": {"load_universal": true}`.
    """
    universal = engine.load_universal_checkpoint()
    has_adapter = _has_adapter(_savable(engine.module))
    groups = engine.optimizer.param_groups
    settings = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in groups]
    path, _ = engine.load_checkpoint(
        str(folder), tag=UNIVERSAL if universal else STATE, load_module_strict=not has_adapter
    )
    assert path is not None, folder
    if universal:  # ZeRO-3 has given all groups the settings of the first, weight decay too, and one counter of steps
        for group, kept in zip(groups, settings, strict=True):
            group.update(kept)
        for state in engine.optimizer.optimizer.state.values():
            state["step"] = copy.deepcopy(state["step"])


def make_universal(folder: str | Path) -> None:
    """Write `folder`/universal from `folder`/state, of ZeRO 1 to 3, by DeepSpeed's own converter. One rank calls it.

    Raises `ValueError` with what the converter said if it fails.
    """
    forget_universal(folder)  # what a start that was killed has left
    source, target = Path(folder) / STATE, Path(folder) / UNIVERSAL
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(source), "--output_folder", str(target)]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    converted = subprocess.run(command, capture_output=True, text=True, check=False)
    if converted.returncode:
        raise ValueError(f"DeepSpeed cannot convert the checkpoint {source}: {converted.stderr.strip()[-500:]}")
    _make_readable_at_every_stage(target)


def _make_readable_at_every_stage(folder: Path) -> None:
    """ZeRO 1 and 2 keep counters, schedule and optimizer settings at other places than 3: put them at both."""
    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
    there = next(folder / name for name in names if (folder / name).exists())
    for name in names:
        if not (folder / name).exists():
            shutil.copy(there, folder / name)
    file = folder / "zero" / "optimizer_state.pt"
    settings = torch.load(file, weights_only=False)
    parameters = [path.parent for path in file.parent.rglob("fp32.pt")]
    if OPTIMIZER_STATE_DICT in settings:
        step = settings[OPTIMIZER_STATE_DICT]["state"][0]["step"]
        for parameter in parameters:
            for part in parameter.glob("*.pt"):
                torch.save({PARAM: torch.load(part)}, part)
            torch.save(step, parameter / "step.pt")
    else:
        step = torch.load(next(file.parent.rglob("step.pt")), weights_only=False)
        settings[OPTIMIZER_STATE_DICT] = {"state": {0: {"step": step}}, "param_groups": settings["param_groups"]}
    torch.save(settings | {"ds_version": deepspeed.__version__}, file)


def forget_universal(folder: str | Path) -> None:
    """Remove what `make_universal` wrote. One rank calls it."""
    shutil.rmtree(Path(folder) / UNIVERSAL, ignore_errors=True)
    (Path(folder) / "latest_universal").unlink(missing_ok=True)


def write_configs(engine: SequenceParallelEngine, folder: str | Path) -> None:
    """Write config, generation config and adapter config, from which an export remakes the model. One rank calls it."""
    model = _savable(engine.module)
    inner = find_model(engine.module)
    inner.config.save_pretrained(folder)
    if getattr(inner, "generation_config", None) is not None:
        inner.generation_config.save_pretrained(folder)
    for adapter in getattr(model, "peft_config", {}).values():
        adapter.save_pretrained(folder)
