"""The model to train: loaded, sharded from the start under ZeRO-3, with an adapter or without, in DeepSpeed's hands."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import get_scheduler
from transformers.integrations import HfDeepSpeedConfig

from ds_ulysses.config import compute_dtype, zero_stage
from ds_ulysses.engine import SequenceParallelEngine, Start, initialize
from ds_ulysses.models import load_model
from ds_ulysses.training.arguments import SftArguments


def build_engine(arguments: SftArguments, start: Start, num_steps: int) -> SequenceParallelEngine:
    """Load the model and hand it to DeepSpeed with its schedule. Afterwards each rank draws random numbers of its own.

    Until then all draw the same: an adapter's first weights must agree. Shards must not drop the same positions.
    """
    config = start.config
    torch.manual_seed(arguments.seed)
    model = load_trained(arguments, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    dims = {p: len(getattr(p, "ds_shape", p.shape)) for p in trained}  # ZeRO-3 holds flat pieces
    matrices, vectors = [p for p in trained if dims[p] > 1], [p for p in trained if dims[p] < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    schedule = partial(
        get_scheduler,
        arguments.lr_scheduler_type,
        num_warmup_steps=arguments.warmup_steps,
        num_training_steps=num_steps,
    )
    engine, *_ = initialize(
        model=model.train(),
        config=config,
        topology=start.topology,
        model_parameters=[group for group in groups if group["params"]],
        lr_scheduler=None if "scheduler" in config else schedule,
    )
    torch.manual_seed(arguments.seed + engine.topology.rank)
    return engine


def load_trained(arguments: SftArguments, config: dict[str, Any]) -> nn.Module:
    """Load the model, with an adapter if it gets one. Raises `ValueError` for layers that cannot have an adapter."""
    zero3 = HfDeepSpeedConfig(config) if zero_stage(config) == 3 else None  # transformers looks for a live one
    model = load_model(arguments.model_name_or_path, compute_dtype(config))
    del zero3
    if arguments.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return with_adapter(model, arguments) if arguments.use_peft else model


def with_adapter(model: nn.Module, arguments: SftArguments) -> nn.Module:
    """Wrap the model by peft, only its adapter to be trained."""
    targets: Any = arguments.lora_target_modules
    config = LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )
    wrapped: nn.Module = get_peft_model(model, config)
    return wrapped
