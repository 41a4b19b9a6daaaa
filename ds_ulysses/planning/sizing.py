"""`ds-ulysses plan`: which numbers of ranks hold a sequence, and what a step takes, from a model's config alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ds_ulysses.config import SequenceParallelConfig
from ds_ulysses.models import empty_model, facts, num_active_weights, num_weights, refuse_unsupported_model
from ds_ulysses.placement import Machine, choose_mesh
from ds_ulysses.planning.estimate import GIB, Hardware, ModelShape, Setup, longest_row, memory, sent, step_time

ASSUMPTIONS = (
    "Assumed: bf16, gradient checkpointing, AdamW, one causal document a row, one row a micro-batch; matrix products "
    "at 60 %, attention at up to 58 % of {peak:.0f} TFLOPS; links at {near:.0f} GB/s in a node, {far:.0f} GB/s between."
)


@dataclass(frozen=True)
class Wish:
    """The sequence, model and GPUs that are asked for."""

    config: Any
    """Of a Hugging Face model."""
    tokens: int
    num_ranks: int
    hardware: Hardware


def plan(wish: Wish) -> tuple[str, dict[str, Any] | None]:
    """Return a page for people, and the DeepSpeed JSON of the best way; None if none fits. Raises `ValueError`."""
    config = wish.config
    refuse_unsupported_model(config)
    model = shape_of(config)
    ways = list(_ways(wish))
    best = next((way for way in ways if _fits(model, way, wish.hardware)), None)
    lines = [
        f"{config.model_type}, {model.num_weights / 1e9:.2f}e9 weights; rows of {wish.tokens:,} tokens on "
        f"{wish.num_ranks} GPUs of {wish.hardware.memory / GIB:.1f} GiB",
        *_table(model, [way for way in ways if way.zero_stage == 3], wish.hardware),
        "",
    ]
    if best is None:
        longest = max(longest_row(model, way, wish.hardware) for way in ways)
        lines.append(f"Nothing fits. {wish.num_ranks} GPUs hold at most {longest:,} tokens: take more of them.")
        return "\n".join(lines), None
    lines += _details(model, best, wish.hardware)
    return "\n".join(lines), deepspeed_json(best)


def shape_of(config: Any) -> ModelShape:
    """Return the sizes of a model by its config; weights are counted without making them."""
    model = empty_model(config)
    return ModelShape(
        num_weights=num_weights(model),
        num_active=num_active_weights(model),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=facts.intermediate_size(config),
        num_heads=facts.head_counts(config)[0],
        num_kv_heads=facts.head_counts(config)[1],
        head_dim=facts.head_dims(config)[0],
        vocab_size=config.vocab_size,
    )


def _ways(wish: Wish) -> Iterator[Setup]:
    """Fewest ranks per sequence first, as replicas need no exchange; then the ZeRO stage that sends least."""
    machine = Machine(min(wish.num_ranks, wish.hardware.gpus_per_node), facts.head_counts(wish.config))
    for sp_size in (n for n in range(1, wish.num_ranks + 1) if wish.num_ranks % n == 0):
        mesh = choose_mesh(SequenceParallelConfig(sequence_parallel_size=sp_size), machine)
        for stage, offload in ((1, False), (2, False), (3, False), (3, True)):
            yield Setup(wish.num_ranks, wish.tokens, mesh, stage, offload)


def _fits(model: ModelShape, way: Setup, hardware: Hardware) -> bool:
    return sum(memory(model, way).values()) <= hardware.memory


def _table(model: ModelShape, ways: list[Setup], hardware: Hardware) -> list[str]:
    lines = [f"{'ranks a sequence':<26}{'ZeRO':<12}{'GiB a rank':>11}  {'longest row':>14}  {'tokens/s a GPU':>14}"]
    for way in ways:
        total = sum(memory(model, way).values()) / GIB
        rate = way.tokens / way.sp_size / sum(step_time(model, way, hardware).values())
        name = f"{way.sp_size} = {way.mesh.ulysses_size} ulysses x {way.mesh.ring_size} ring"
        stage = "3, offload" if way.offload else str(way.zero_stage)
        fits = "" if _fits(model, way, hardware) else "   does not fit"
        shown = f"{'-' if way.offload else f'{rate:,.0f}':>14}"
        lines.append(f"{name:<26}{stage:<12}{total:>11.1f}  {longest_row(model, way, hardware):>14,}  {shown}{fits}")
    return lines


def _details(model: ModelShape, best: Setup, hardware: Hardware) -> list[str]:
    parts, times = memory(model, best), step_time(model, best, hardware)
    longest = longest_row(model, best, hardware)
    at, twice = (memory(model, replace(best, tokens=n * longest)) for n in (1, 2))
    most = max(parts, key=lambda name: twice[name] - at[name])
    strategy = f"{best.mesh.strategy}, {best.mesh.reason}" if best.mesh.reason else best.mesh.strategy
    offload = ", optimizer offloaded" if best.offload else ""
    replicas = best.num_ranks // best.sp_size
    return [
        f"Best: {best.sp_size} ranks a sequence, {replicas} replicas, ZeRO-{best.zero_stage}{offload}; {strategy}",
        "memory of a rank, GiB   " + ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items()),
        "sent by a rank, GiB     "
        + (", ".join(f"{n} {b / GIB:.1f}" for n, b in sent(model, best).items()) or "nothing"),
        "seconds a micro-batch   " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in times.items()),
        f"It holds rows of up to {longest:,} tokens; most of what longer ones would add are the {most}.",
        ASSUMPTIONS.format(
            peak=hardware.peak_flops / 1e12, near=hardware.node_bandwidth / 1e9, far=hardware.network_bandwidth / 1e9
        ),
    ]


def deepspeed_json(way: Setup) -> dict[str, Any]:
    """Return JSON that is ready for `--deepspeed`; what the trainer's arguments decide is "auto"."""
    zero: dict[str, Any] = {"stage": way.zero_stage, "overlap_comm": True, "contiguous_gradients": True}
    if way.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    levels = {"ulysses_size": way.mesh.ulysses_size, "ring_size": way.mesh.ring_size}
    return {
        "sequence_parallel_size": way.sp_size,
        "ds_ulysses": {"strategy": way.mesh.strategy} | (levels if way.mesh.strategy == "hierarchical" else {}),
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    } | dict.fromkeys(auto, "auto")
