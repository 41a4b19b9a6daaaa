"""Every strategy beside the one-process kernel and beside others' attention, in turns, in one run.

    python -m benchmarks.attention

One causal attention layer, forward and backward, on gloo ranks with one thread each; the one-process kernel has as many
threads as there are ranks, so that both do the same work on the same cores. With more ranks than cores, the time of a
turn says little; the processor time of the busiest rank says what a turn would take if each had a core.

Others take part where they are installed and run on a CPU: `pip install --no-deps yunchang axolotl-ringmaster`.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measure import peak_memory
from tests.distributed import RankFailed, run_ranks

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
BASELINE = "ulysses"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [1, S, H, D], k and v [1, S, K, D] -> [1, S, H, D]."""


def ours(**block: Any) -> Attend:
    import ds_ulysses

    config = ds_ulysses.SequenceParallelConfig(sequence_parallel_size=dist.get_world_size(), **block)
    return ds_ulysses.DistributedAttention(topology=ds_ulysses.Topology.create(config))


def strategies(sp_size: int) -> dict[str, Callable[[], Attend]]:
    found: dict[str, Callable[[], Attend]] = {
        "ulysses": lambda: ours(strategy="ulysses"),
        "ulysses, 2 head groups": lambda: ours(strategy="ulysses", ulysses_head_groups=2),
        "ring, zigzag": lambda: ours(strategy="ring"),
        "ring, contiguous": lambda: ours(strategy="ring", layout="contiguous"),
        "all_gather": lambda: ours(strategy="all_gather"),
    }
    if sp_size > 2:
        found[f"hierarchical {sp_size // 2} x 2"] = lambda: ours(strategy="hierarchical", ring_size=2)
    return found


def torch_context_parallel() -> Attend:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        places = torch.arange(q.shape[2] * dist.get_world_size())  # q, k and v are shards already
        with context_parallel(mesh, buffers=[places], buffer_seq_dims=[0]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return attend


def yunchang_ulysses() -> Attend:
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    attention = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_FLASH)
    return lambda q, k, v: attention(q, k, v, causal=True)


def yunchang_ring() -> Attend:
    from yunchang import ring_pytorch_attn_func
    from yunchang.kernels import AttnType

    return lambda q, k, v: ring_pytorch_attn_func(
        q, k, v, causal=True, group=dist.group.WORLD, attn_type=AttnType.TORCH_FLASH
    )


def ringmaster_ring() -> Attend:
    from ringmaster.ring.p2p_attn import ring_p2p_attention

    return lambda q, k, v: ring_p2p_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), group=dist.group.WORLD, causal=True, scaling=HEAD_DIM**-0.5
    )


def ringmaster_zigzag() -> Attend:
    from ringmaster.ring.zigzag import zigzag_ring_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=2) for x in (k, v))
        return zigzag_ring_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), group=dist.group.WORLD, scaling=HEAD_DIM**-0.5
        )

    return attend


OTHERS: dict[str, Callable[[], Attend]] = {
    "torch context_parallel": torch_context_parallel,
    "yunchang ulysses": yunchang_ulysses,
    "yunchang ring": yunchang_ring,
    "ringmaster ring": ringmaster_ring,
    "ringmaster zigzag ring": ringmaster_zigzag,
}


@dataclass
class Result:
    """Of one side on one rank."""

    memory: int
    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)


def step_of(attend: Attend, tokens: int) -> Callable[[], None]:
    q, k, v = (torch.randn(1, tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> None:
        torch.autograd.grad(attend(*leaves).sum(), leaves)

    return step


def one_process(tokens: int, num_threads: int) -> Callable[[], None]:
    """The kernel alone, on rank 0, with the threads of all ranks; the others wait."""
    if dist.get_rank():
        return lambda: None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    step = step_of(attend, tokens)

    def with_threads() -> None:
        torch.set_num_threads(num_threads)
        step()
        torch.set_num_threads(1)

    return with_threads


def try_once(name: str, tokens: int) -> None:
    step_of(OTHERS[name](), tokens)()


def refusal_of(name: str, sp_size: int) -> str:
    """Why others' attention does not run here, or nothing. In processes of their own, as some end in a deadlock."""
    try:
        run_ranks(try_once, sp_size, name, 256, limit=60)
    except RankFailed as error:
        lines = str(error).strip().splitlines()
        return next((line for line in lines if re.match(r"\w*Error: ", line)), lines[-1])[:100]
    return ""


def compare(sp_size: int, tokens: int, turns: int, others: list[str]) -> dict[str, Result]:
    """On each rank: every side that runs."""
    steps = {"one process": one_process(tokens, sp_size)}
    for name, make in {**strategies(sp_size), **{name: OTHERS[name] for name in others}}.items():
        steps[name] = step_of(make(), tokens // sp_size)
    results = {name: Result(peak_memory(step)) for name, step in steps.items()}
    order = random.Random(0)
    for _ in range(turns):
        for name in order.sample(sorted(steps), len(steps)):
            dist.barrier()
            begun, processor_begun = time.perf_counter(), time.process_time()
            steps[name]()
            results[name].processor_seconds.append(time.process_time() - processor_begun)
            dist.barrier()
            results[name].seconds.append(time.perf_counter() - begun)
    return results


def row(name: str, ranks: list[dict[str, Result]]) -> str:
    results = [rank[name] for rank in ranks]
    ratios = sorted(a / b for a, b in zip(results[0].seconds, ranks[0][BASELINE].seconds, strict=True))
    busiest = max(statistics.median(result.processor_seconds) for result in results)
    reference = max(statistics.median(rank[BASELINE].processor_seconds) for rank in ranks)
    memory = max(result.memory for result in results) / 2**20
    spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return f"| {name} | {spread} | {busiest / reference:.2f} | {memory:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sp", type=int, nargs="+", default=[2, 4, 8], help="group sizes")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the whole sequence")
    parser.add_argument("--turns", type=int, default=9, help="timed steps of each side")
    arguments = parser.parse_args()
    for sp_size in arguments.sp:
        refusals = {name: refusal_of(name, sp_size) for name in OTHERS}
        others = [name for name, refusal in refusals.items() if not refusal]
        ranks = run_ranks(compare, sp_size, sp_size, arguments.tokens, arguments.turns, others, limit=3600)
        print(f"\nsp {sp_size}: {HEADS} query, {KV_HEADS} KV heads of {HEAD_DIM}, causal, {arguments.tokens} tokens\n")
        print(f"| | time, {BASELINE} = 1 (least to most) | busiest rank's processor time, {BASELINE} = 1 | peak MiB |")
        print("|---|---|---|---|")
        for name in ranks[0]:
            print(row(name, ranks), flush=True)
        for name, refusal in refusals.items():
            if refusal:
                print(f"| {name} | {refusal} | | |")


if __name__ == "__main__":
    main()
