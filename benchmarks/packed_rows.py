"""What many documents in a row cost attention, and how long it takes to work out who attends to what.

    python -m benchmarks.packed_rows

One attention layer, forward and backward, over a packed row on gloo ranks with one thread each, beside the least that
these documents can cost on a CPU: the kernel alone, called for one document after the other, in turns in one run. Times
are processor times of the busiest rank; its kernel alone does its share of heads of the whole row (Ulysses), or of all
documents (ring). "Planning" is what a new batch adds: the first call on a placement beside later ones, against a step
of a decoder of 4 layers.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed import run_ranks

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 8, 2, 64, 4
NUM_DOCUMENTS = (16, 64, 300, 1000)


class Result(NamedTuple):
    """Processor seconds of one rank."""

    packed: float
    kernel: float
    first: float
    decoder: float


def lengths_of(num_documents: int, tokens: int) -> list[int]:
    cuts = sorted(random.Random(num_documents).sample(range(1, tokens), num_documents - 1))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, tokens], strict=True)]


def processor_time(step: Callable[[], object]) -> float:
    dist.barrier()
    begun = time.process_time()
    step()
    seconds = time.process_time() - begun
    dist.barrier()
    return seconds


def leaves_of(tokens: int, heads: int, kv_heads: int) -> list[Tensor]:
    return [torch.randn(1, tokens, h, HEAD_DIM, requires_grad=True) for h in (heads, kv_heads, kv_heads)]


def kernel_alone(lengths: list[int], share: int) -> Callable[[], None]:
    """One rank's share of the work: some heads of all documents."""
    leaves = leaves_of(sum(lengths), HEADS // share, max(KV_HEADS // share, 1))
    attend = torch.nn.functional.scaled_dot_product_attention

    def step() -> None:
        for documents in zip(*(x.detach().split(lengths, dim=1) for x in leaves), strict=True):
            q, k, v = (x.transpose(1, 2).requires_grad_() for x in documents)
            torch.autograd.grad(attend(q, k, v, is_causal=True, enable_gqa=True).sum(), [q, k, v])

    return step


def decoder(tokens: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM, intermediate_size=1024, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=256, max_position_embeddings=tokens,
    )  # fmt: skip
    return LlamaModel(config).train()


def measure(num_documents: int, tokens: int, strategy: str, turns: int) -> Result:
    import ds_ulysses

    world = dist.get_world_size()
    config = ds_ulysses.SequenceParallelConfig(sequence_parallel_size=world, strategy=strategy)
    topology = ds_ulysses.Topology.create(config)
    lengths = lengths_of(num_documents, tokens)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    model, ids = decoder(tokens), torch.randint(256, (1, tokens))
    ds_ulysses.patch_model(model, topology)
    attention, leaves = ds_ulysses.DistributedAttention(topology=topology), leaves_of(tokens // world, HEADS, KV_HEADS)
    alone = kernel_alone(lengths, world)

    def shard() -> dict[str, Tensor]:
        return ds_ulysses.shard_batch({"input_ids": ids, "position_ids": positions}, topology)

    def attend(placement: object) -> None:
        torch.autograd.grad(attention(*leaves, None, placement).sum(), leaves)

    def step() -> None:
        model(**shard(), use_cache=False).last_hidden_state.sum().backward()

    seconds: list[list[float]] = [[], [], [], []]
    for _ in range(turns + 1):
        placement = shard()["placement"]
        steps = (lambda p=placement: attend(p), lambda p=placement: attend(p), alone, step)
        for column, one in zip(seconds, steps, strict=True):
            column.append(processor_time(one))
    first, packed, kernel, whole = (statistics.median(column[1:]) for column in seconds)
    return Result(packed, kernel, first, whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of the row")
    parser.add_argument("--turns", type=int, default=7, help="timed steps of each side")
    arguments = parser.parse_args()
    print(f"{HEADS} query, {KV_HEADS} KV heads of {HEAD_DIM}, rows of {arguments.tokens} tokens; kernel alone = 1\n")
    print("| | " + " | ".join(f"{n} documents" for n in NUM_DOCUMENTS) + " | planning, of a step with 300 |")
    print("|---|" + "---|" * (len(NUM_DOCUMENTS) + 1))
    for world, strategy in ((1, "ulysses"), (2, "ulysses"), (4, "ulysses"), (2, "ring"), (4, "ring")):
        cells, planning = [], ""
        for count in NUM_DOCUMENTS:
            ranks = run_ranks(measure, world, count, arguments.tokens, strategy, arguments.turns, limit=900)
            cells.append(f"{max(r.packed for r in ranks) / max(r.kernel for r in ranks):.2f}")
            if count == 300:
                planning = f"{max((r.first - r.packed) / r.decoder for r in ranks):.2%}"
        print(f"| {strategy}, sp {world} | " + " | ".join(cells) + f" | {planning} |", flush=True)


if __name__ == "__main__":
    main()
