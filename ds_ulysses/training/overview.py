"""What is going to happen, said before it costs anything."""

from __future__ import annotations

import json
from typing import Any

from ds_ulysses.comm import Topology
from ds_ulysses.config import compute_dtype, zero_stage
from ds_ulysses.data import Batching, Samples, Stream, Survey, survey_epoch
from ds_ulysses.engine import Start
from ds_ulysses.models import facts
from ds_ulysses.placement import Geometry, HeadSplit, make_schedule
from ds_ulysses.planning import AttentionShape, predict


def overview(
    start: Start,
    samples: Samples | Stream,
    batching: Batching,
    eval_samples: Samples | None = None,
) -> str:
    """Tell people the mesh, batch, padding, balance, heads, kernel, communication and DeepSpeed settings in force."""
    (config, model_config, topology, *_), survey = start, None
    if isinstance(samples, Samples):
        survey = survey_epoch(samples.documents, len(samples), batching, topology.sp_size)
    longest = survey.longest if survey else Survey(batching, topology.sp_size).filled(_longest(batching))
    sections = {
        "mesh": _mesh(topology, config),
        "batch": _batch(batching, survey),
        "data": _data(samples),
        "evaluate": _data(eval_samples) if eval_samples else "nothing",
        "padding": _padding(survey),
        "balance": _balance(batching, survey),
        "strategy": _strategy(topology, longest),
        "heads": _heads(topology, model_config),
        "kernel": f"{start.kernel.name} ({start.kernel_reason})",
        "exchange": _communication(topology, config, model_config, batching, longest),
        "deepspeed": json.dumps(config, sort_keys=True),
    }
    return "\n".join(f"{name:>10}  {text}" for name, text in sections.items())


def _mesh(topology: Topology, config: dict[str, Any]) -> str:
    return (
        f"{topology.world_size} ranks = data-parallel {topology.dp_size} x sequence-parallel {topology.sp_size} "
        f"(ranks 0 to {topology.sp_size - 1} share a sequence), on {topology.device.type}, ZeRO-{zero_stage(config)}"
    )


def _batch(batching: Batching, survey: Survey | None) -> str:
    sizes = batching.sizes
    unit = f"packs of up to {batching.max_length:,} tokens" if batching.packing else "samples"
    steps = f"{survey.num_steps} steps per epoch" if survey else "epochs without a known end"
    return (
        f"{sizes.train} {unit} per optimizer step = {sizes.micro} per micro-batch x {sizes.accumulation} accumulated x "
        f"data-parallel {batching.dp_size}; {steps}"
    )


def _data(samples: Samples | Stream) -> str:
    if isinstance(samples, Stream):
        return "a stream, tokenised as it is read; samples without a supervised token are left out"
    return (
        f"{len(samples)} samples, {int(samples.lengths.sum()):,} tokens, {int(samples.num_targets.sum()):,} of them "
        f"supervised; {samples.num_cut} cut to the maximum length, {samples.num_skipped} skipped because no supervised "
        f"token is left"
    )


def _padding(survey: Survey | None) -> str:
    """Over the first epoch, beside what as many micro-batches of padded rows would be."""
    if survey is None:
        return "as it comes; the log has it for each step"
    text = f"{survey.padding:.1%} of all computed tokens"
    if survey.batching.flat:
        text += (
            f"; as many micro-batches of padded rows would be {1 - survey.real_tokens / survey.padded_tokens:.1%} "
            f"padding, {survey.padded_tokens / survey.computed_tokens:.2f}x the tokens"
        )
    return text


def _balance(batching: Batching, survey: Survey | None) -> str:
    """Between replicas, over the first epoch."""
    if survey is None:
        return "as it comes; the log has it for each step"
    return (
        f"busiest replica {survey.imbalance:.3f}x the mean; {survey.num_micro_steps:,} micro-batches per replica and "
        f"epoch, with one sample each {-(-survey.num_samples // batching.dp_size):,}; attention of a sample costs as "
        f"much as all else at {batching.cost.crossover:,.0f} tokens"
    )


def _longest(batching: Batching) -> int:
    """Tokens of a row that is as long as it may be."""
    return batching.max_length * (batching.sizes.micro if batching.flat else 1)


def _strategy(topology: Topology, longest: int) -> str:
    """With the balance of the ring: attention of the longest row, causal, by the schedule."""
    mesh = topology.mesh
    geometry = Geometry(longest, mesh.ring_size, mesh.layout)
    schedules = [make_schedule(geometry, ring_rank) for ring_rank in range(mesh.ring_size)]
    work = [sum(pair.num_seen for step in schedule for pair in step.pairs) for schedule in schedules]
    return f"{mesh}; attention of the busiest ring rank {max(work) * len(work) / sum(work):.2f}x the mean"


def _heads(topology: Topology, model_config: Any) -> str:
    split = HeadSplit(*facts.head_counts(model_config), topology.mesh.ulysses_size)
    per_rank = ", ".join(f"{q}/{kv}" for q, kv in map(split.counts, range(split.sp_size)))
    busiest = "even" if split.imbalance == 1 else f"busiest rank {split.imbalance:.2f}x the mean"
    return f"{split.num_heads} query / {split.num_kv_heads} KV heads, per rank {per_rank} ({busiest})"


def _communication(
    topology: Topology, config: dict[str, Any], model_config: Any, batching: Batching, tokens: int
) -> str:
    """For the longest row, as if no layer had a window; without what gradient checkpointing repeats."""
    rows = 1 if batching.flat else batching.sizes.micro
    dims = facts.head_dims(model_config)
    shape = AttentionShape(
        *facts.head_counts(model_config), dims[0], tokens, compute_dtype(config), batch_size=rows, value_dim=dims[1]
    )
    entries = predict(shape, topology.mesh, topology.sp_rank)
    times = model_config.num_hidden_layers * batching.sizes.accumulation
    sent = {
        level: sum(entry.bytes_sent for entry in entries if entry.level == level) * times / 2**20
        for level in sorted({entry.level for entry in entries})
    }
    total = " + ".join(f"{size:,.1f} MiB ({level})" for level, size in sent.items()) or "nothing"
    return (
        f"{len(entries)} messages per layer and micro-batch, at most {total} sent by this rank per step "
        f"({tokens // topology.sp_size:,} of {tokens:,} tokens each)"
    )
