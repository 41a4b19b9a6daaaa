"""From a checkpoint to a folder that `from_pretrained` opens, in one process and without a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from peft import PeftConfig, get_peft_model
from torch import Tensor
from transformers import GenerationConfig

from ds_ulysses.config import dtype_name, torch_dtype
from ds_ulysses.engine.checkpoint import STATE
from ds_ulysses.engine.files import fault_of, finished_folder
from ds_ulysses.models import empty_model, load_model, load_model_config

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
)
DTYPES = ("fp32", "bf16", "fp16")


def export(checkpoint: Path, target: Path, dtype: str = "fp32", merge: bool = False) -> None:
    """Write model and tokenizer into `target`, whole or not at all.

    Of a run with an adapter that is the adapter alone, or, with `merge`, the base model with it added. Raises
    `ValueError` for a folder that is no whole checkpoint, and a target that holds files already.
    """
    if fault := fault_of(checkpoint):
        raise ValueError(f"{checkpoint} is no whole checkpoint: {fault}. Give a folder such as checkpoint-100.")
    if merge and not _has_adapter(checkpoint):
        raise ValueError(f"{checkpoint} has no adapter that could be merged. Leave --merge out.")
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} is not empty. Choose another folder.")
    with finished_folder(target) as folder:
        write_model(checkpoint, folder, torch_dtype(dtype), merge)


def write_model(checkpoint: Path, folder: Path, dtype: torch.dtype, merge: bool = False) -> None:
    """Write model and tokenizer of a whole checkpoint, as `export` does, into a folder that is there."""
    weights = {name: weight.to(dtype) for name, weight in read_weights(checkpoint).items()}
    if _has_adapter(checkpoint):
        _save_adapter(checkpoint, folder, weights, merge)
    else:
        model = _empty_model(checkpoint)
        model.load_state_dict(weights, strict=True, assign=True)
        model.save_pretrained(folder)
    for pattern in TOKENIZER_FILES:
        for file in checkpoint.glob(pattern):
            shutil.copy(file, folder)


def _has_adapter(checkpoint: Path) -> bool:
    return (checkpoint / "adapter_config.json").is_file()


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Read all that was trained, by name, in fp32 where the optimizer kept it so."""
    folder = checkpoint / STATE
    if not list(folder.glob("*_optim_states.pt")):
        state: dict[str, Tensor] = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)["module"]
        return state
    frozen_left_out = _has_adapter(checkpoint)
    return dict(
        get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), STATE, exclude_frozen_parameters=frozen_left_out)
    )


def _empty_model(checkpoint: Path) -> Any:
    """The model by its config, without weights."""
    model = empty_model(load_model_config(str(checkpoint)))
    if (checkpoint / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint)
    return model


def _save_adapter(checkpoint: Path, target: Path, weights: dict[str, Tensor], merge: bool) -> None:
    adapter = PeftConfig.from_pretrained(str(checkpoint))
    if not merge:
        model = _empty_model(checkpoint)
        model.name_or_path = adapter.base_model_name_or_path  # which peft takes for the base's name
        get_peft_model(model, adapter).save_pretrained(str(target), state_dict=weights)
        return
    dtype = next(iter(weights.values())).dtype
    base = load_model(adapter.base_model_name_or_path, dtype_name(dtype))
    model = get_peft_model(base, adapter)
    loaded = model.load_state_dict(weights, strict=False)
    assert not loaded.unexpected_keys, loaded.unexpected_keys
    merged: Any = model.merge_and_unload()
    merged.save_pretrained(target)
