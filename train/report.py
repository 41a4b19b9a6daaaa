"""What is going to happen, said before it costs anything."""

from __future__ import annotations

import itertools
import json
from typing import Any

from ds_ulysses.attention.ulysses import predict
from ds_ulysses.deepspeed_json import BatchSizes, compute_dtype, zero_stage
from ds_ulysses.engine import check_model_config
from ds_ulysses.heads import HeadSplit
from ds_ulysses.support import head_dim
from ds_ulysses.topology import Topology
from train.data import Samples, plan_steps, steps_per_epoch


def start_report(
    topology: Topology, config: dict[str, Any], model_config: Any, samples: Samples, sizes: BatchSizes, seed: int
) -> str:
    """Mesh, batch, padding, heads, kernel, communication and the DeepSpeed settings in force, for people."""
    sections = {
        "mesh": _mesh(topology, config),
        "batch": f"{sizes.train} samples per optimizer step = {sizes.micro} per micro-batch x {sizes.accumulation} "
        f"accumulated x data-parallel {topology.dp_size}; {steps_per_epoch(len(samples), sizes)} steps per epoch",
        "data": f"{len(samples)} samples, {int(samples.lengths.sum()):,} tokens, {int(samples.num_targets.sum()):,} of "
        f"them supervised; {samples.num_cut} cut to the maximum length, {samples.num_skipped} skipped because no "
        f"supervised token is left",
        "padding": _padding(topology, samples, sizes, seed),
        "heads": _heads(topology, model_config),
        "kernel": _kernel(topology, config, model_config),
        "exchange": _communication(topology, config, model_config, samples, sizes),
        "deepspeed": json.dumps(config, sort_keys=True),
    }
    return "\n".join(f"{name:>10}  {text}" for name, text in sections.items())


def _mesh(topology: Topology, config: dict[str, Any]) -> str:
    return (
        f"{topology.world_size} ranks = data-parallel {topology.dp_size} x sequence-parallel {topology.sp_size} "
        f"(ranks 0 to {topology.sp_size - 1} share a sequence), on {topology.device.type}, ZeRO-{zero_stage(config)}"
    )


def _padding(topology: Topology, samples: Samples, sizes: BatchSizes, seed: int) -> str:
    """Over the first epoch, as it will be batched: rows of a micro-batch are padded to the longest of them."""
    steps = itertools.islice(
        plan_steps(len(samples), sizes, topology.dp_size, seed), steps_per_epoch(len(samples), sizes)
    )
    real = padded = 0
    for step in steps:
        lengths = samples.lengths[step.indices]
        longest = lengths.max(dim=-1).values.clamp(min=1)
        real += int(lengths.sum())
        padded += int((-(-longest // topology.sp_size) * topology.sp_size).sum()) * sizes.micro
    return f"{1 - real / padded:.1%} of all computed tokens"


def _split(topology: Topology, model_config: Any) -> HeadSplit:
    return HeadSplit(model_config.num_attention_heads, model_config.num_key_value_heads, topology.sp_size)


def _heads(topology: Topology, model_config: Any) -> str:
    split = _split(topology, model_config)
    per_rank = ", ".join(f"{q}/{kv}" for q, kv in map(split.counts, range(topology.sp_size)))
    busiest = "even" if split.imbalance == 1 else f"busiest rank {split.imbalance:.2f}x the mean"
    return f"{split.num_heads} query / {split.num_kv_heads} KV heads, per rank {per_rank} ({busiest})"


def _kernel(topology: Topology, config: dict[str, Any], model_config: Any) -> str:
    kernel, why = check_model_config(model_config, compute_dtype(config), topology)
    return f"{kernel.name} ({why})"


def _communication(
    topology: Topology, config: dict[str, Any], model_config: Any, samples: Samples, sizes: BatchSizes
) -> str:
    """For the longest sample, which decides whether it fits; without what gradient checkpointing repeats."""
    tokens = -(-int(samples.lengths.max()) // topology.sp_size)
    entries = predict(
        _split(topology, model_config), topology.sp_rank, sizes.micro, tokens, head_dim(model_config),
        compute_dtype(config),
    )  # fmt: skip
    sent = sum(entry.bytes_sent for entry in entries) * model_config.num_hidden_layers * sizes.accumulation
    return (
        f"{len(entries)} all-to-alls per layer and micro-batch, at most {sent / 2**20:,.1f} MiB sent by this rank per "
        f"step ({tokens:,} of {tokens * topology.sp_size:,} tokens each)"
    )
