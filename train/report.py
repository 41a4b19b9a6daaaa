"""What is going to happen, said before it costs anything."""

from __future__ import annotations

import itertools
import json
from typing import Any

from ds_ulysses.deepspeed_json import BatchSizes, compute_dtype, zero_stage
from ds_ulysses.engine import choose_kernel
from ds_ulysses.heads import HeadSplit
from ds_ulysses.plan import Geometry, make_plan
from ds_ulysses.predict import AttentionShape, predict
from ds_ulysses.support import head_counts, head_dims
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
        "strategy": _strategy(topology, samples),
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


def _longest(topology: Topology, samples: Samples) -> int:
    """Tokens of the longest sample, which decides whether it fits, filled up to what the ranks can share."""
    return -(-int(samples.lengths.max()) // topology.sp_size) * topology.sp_size


def _strategy(topology: Topology, samples: Samples) -> str:
    """With the balance of the ring: attention of the longest sample, causal, by the plan."""
    mesh = topology.mesh
    geometry = Geometry(_longest(topology, samples), mesh.ring_size, mesh.layout)
    plans = [make_plan(geometry, ring_rank) for ring_rank in range(mesh.ring_size)]
    work = [sum(pair.num_seen for step in plan for pair in step.pairs) for plan in plans]
    return f"{mesh}; attention of the busiest ring rank {max(work) * len(work) / sum(work):.2f}x the mean"


def _heads(topology: Topology, model_config: Any) -> str:
    split = HeadSplit(*head_counts(model_config), topology.mesh.ulysses_size)
    per_rank = ", ".join(f"{q}/{kv}" for q, kv in map(split.counts, range(split.sp_size)))
    busiest = "even" if split.imbalance == 1 else f"busiest rank {split.imbalance:.2f}x the mean"
    return f"{split.num_heads} query / {split.num_kv_heads} KV heads, per rank {per_rank} ({busiest})"


def _kernel(topology: Topology, config: dict[str, Any], model_config: Any) -> str:
    kernel, why = choose_kernel(model_config, compute_dtype(config), topology)
    return f"{kernel.name} ({why})"


def _communication(
    topology: Topology, config: dict[str, Any], model_config: Any, samples: Samples, sizes: BatchSizes
) -> str:
    """For the longest sample, as if no layer had a window; without what gradient checkpointing repeats."""
    tokens = _longest(topology, samples)
    dims = head_dims(model_config)
    shape = AttentionShape(
        *head_counts(model_config), dims[0], tokens, compute_dtype(config), batch_size=sizes.micro, value_dim=dims[1]
    )
    entries = predict(shape, topology.mesh, topology.sp_rank)
    times = model_config.num_hidden_layers * sizes.accumulation
    sent = {
        level: sum(entry.bytes_sent for entry in entries if entry.level == level) * times / 2**20
        for level in sorted({entry.level for entry in entries})
    }
    total = " + ".join(f"{size:,.1f} MiB ({level})" for level, size in sent.items()) or "nothing"
    return (
        f"{len(entries)} messages per layer and micro-batch, at most {total} sent by this rank per step "
        f"({tokens // topology.sp_size:,} of {tokens:,} tokens each)"
    )
