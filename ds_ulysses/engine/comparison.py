"""Whether sequence parallelism trains the same here: a model's loss and gradients on all ranks against one process.

The other side shares no code with this package: plain transformers, eager attention, fp64, every document alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from ds_ulysses.batch import shard_batch
from ds_ulysses.comm import Ledger, in_turns, ledger
from ds_ulysses.config import load_deepspeed_json, zero_stage
from ds_ulysses.engine.distributed import init_distributed
from ds_ulysses.engine.engine import SequenceParallelEngine
from ds_ulysses.engine.start import initialize
from ds_ulysses.models import facts, load_model, load_model_config, random_model, refuse_unsupported_model

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
"""Of the loss, and of each gradient relative to its norm: rounding, where a fault is some tenths."""
NOISE = 1e-4
"""Gradients of a norm below this share of the whole gradient's are mostly rounding, and count by that norm."""


@dataclass(frozen=True)
class Subject:
    """The model and the settings that are checked."""

    model: str
    deepspeed: str
    layers: int
    """Of the model, with random weights; 0: all of them, with its own."""
    tokens: int
    """Of a row, in two documents."""
    dtype: str


def check(subject: Subject) -> tuple[str, bool]:
    """Compare all ranks with one process; returns a table for people, and whether all is the same.

    Collective. Raises `ValueError` for what is refused anyway.
    """
    world_size = init_distributed()
    config = _deepspeed_config(load_deepspeed_json(subject.deepspeed), subject.dtype, world_size)
    model = _model(subject)
    dp_size = world_size // config["sequence_parallel_size"]
    documents = _documents(dp_size, subject.tokens, model.config.vocab_size)
    rank = dist.get_rank()
    right = in_turns(lambda: (0.0, {}) if rank else _one_process(model, documents), min(rank, 1))
    engine, *_ = initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    loss, found, book = _all_ranks(engine, documents)
    lines, same = _compare(loss, found, right, TOLERANCE[subject.dtype])
    mesh = engine.topology.mesh
    head = (
        f"{type(model).__name__}, {model.config.num_hidden_layers} layers, {subject.tokens} tokens in 2 documents, "
        f"{subject.dtype}; {world_size} ranks = data-parallel {dp_size} x {mesh}; ZeRO-{zero_stage(config)}"
    )
    sent = (f"{book.count(direction=d)} {d}, {book.bytes_sent(direction=d):,} bytes" for d in ("forward", "backward"))
    verdict = "the same, to rounding" if same else "NOT THE SAME: do not train with this"
    return "\n".join([head, *lines, f"messages of rank 0    {'; '.join(sent)}", f"verdict: {verdict}"]), same


def _deepspeed_config(config: Mapping[str, Any], dtype: str, world_size: int) -> dict[str, Any]:
    """Of the JSON what makes gradients; sizes that a trainer would fill are left out."""
    sp_size = config.get("sequence_parallel_size", "auto")
    zero = {key: value for key, value in config.get("zero_optimization", {}).items() if value != "auto"}
    zero.pop("offload_optimizer", None)  # it would want DeepSpeed's own Adam
    return {
        "sequence_parallel_size": world_size if sp_size == "auto" else sp_size,
        "ds_ulysses": config.get("ds_ulysses", {}),
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bf16"},
    }


def _model(subject: Subject) -> Any:
    config = load_model_config(subject.model)
    refuse_unsupported_model(config)
    for name in (text.split("=")[0] for text in facts.dropouts(config)):
        setattr(config, name, 0.0)  # chance would differ
    config.output_router_logits = False
    if not subject.layers:
        return load_model(subject.model, subject.dtype, config).train()
    config.num_hidden_layers = min(subject.layers, config.num_hidden_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(0)
    return random_model(config, subject.dtype).train()


def _documents(dp_size: int, tokens: int, vocab_size: int) -> list[list[Tensor]]:
    """[replica][document]: token ids."""
    drawn = torch.Generator().manual_seed(0)
    cut = tokens * 5 // 8
    return [
        list(torch.randint(vocab_size, (tokens,), generator=drawn).split([cut, tokens - cut])) for _ in range(dp_size)
    ]


def _one_process(model: Any, documents: list[list[Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients [on the CPU] of all documents."""
    plain = copy.deepcopy(model).double()
    plain.set_attn_implementation("eager")
    alone = [document for replica in documents for document in replica]
    num_targets = sum(len(document) - 1 for document in alone)
    total = 0.0
    for ids in alone:
        logits = plain(input_ids=ids[None], use_cache=False).logits[0, :-1]
        loss = cross_entropy(logits, ids[1:], reduction="sum") / num_targets
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def _all_ranks(
    engine: SequenceParallelEngine, documents: list[list[Tensor]]
) -> tuple[float, dict[str, Tensor], Ledger]:
    mine = documents[engine.topology.dp_rank]
    ids = torch.cat(mine)[None]
    positions = torch.cat([torch.arange(len(document)) for document in mine])[None]
    with ledger() as book:
        shard = shard_batch({"input_ids": ids, "labels": ids, "position_ids": positions}, engine.topology)
        loss = engine(**shard).loss
        engine.backward(loss)
    return loss.item(), {name: grad.cpu() for name, grad in engine.full_gradients().items()}, book


def _compare(
    loss: float, found: dict[str, Tensor], right: tuple[float, dict[str, Tensor]], tolerance: float
) -> tuple[list[str], bool]:
    """Lines for people, and whether all is within the tolerance; on ranks without the right values, nothing."""
    right_loss, right_grads = right
    if not right_grads:
        return [], True
    total = torch.stack([grad.norm() for grad in right_grads.values()]).norm().item()
    errors = {
        name: (found[name].double() - grad).norm().item() / max(grad.norm().item(), NOISE * total)
        for name, grad in right_grads.items()
    }
    worst = max(errors, key=errors.__getitem__)
    norm = torch.stack([grad.double().norm() for grad in found.values()]).norm().item()
    loss_error = abs(loss - right_loss) / abs(right_loss)
    lines = [
        f"{'':<22}{'one process':>16}{'all ranks':>16}{'error':>10}",
        f"{'loss':<22}{right_loss:>16.8f}{loss:>16.8f}{loss_error:>10.1e}",
        f"{'norm of the gradient':<22}{total:>16.8f}{norm:>16.8f}{abs(norm - total) / total:>10.1e}",
        f"{'worst of ' + str(len(errors)) + ' gradients':<54}{errors[worst]:>10.1e}  {worst}",
    ]
    return lines, max(loss_error, errors[worst]) <= tolerance and found.keys() == right_grads.keys()
