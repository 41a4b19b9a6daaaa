"""The kernel work of a ring on one device: blocks, masks and merging as the plan says, with nothing to wait for.

    python -m benchmarks.ring_blocks                                             # a GPU, bf16, 32k tokens
    python -m benchmarks.ring_blocks --device cpu --tokens 8192 --turns 3

Each ring rank's steps are run in turn on the same device, forward and backward. Their time together, over that of one
kernel call on the whole sequence, is what cutting attention into blocks costs; 1.00 would be nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ds_ulysses.kernels import Kernel, Mask, Request, merge, select_kernel
from ds_ulysses.placement import Geometry, held_by, make_schedule, token_index

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5


def whole(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> None:
    out, lse = kernel.forward(q, k, v, Mask(SCALE))
    kernel.gradients(out, (q, k, v), (out, lse), Mask(SCALE))


class RingRank:
    """Queries of one ring rank, and the block of each of its steps."""

    def __init__(self, kernel: Kernel, geometry: Geometry, rank: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        held = [torch.from_numpy(token_index(pieces, 1)[:, 0]).to(q.device) for pieces in held_by(geometry)]
        self.kernel, self.plan, self.q = kernel, make_schedule(geometry, rank), q[:, held[rank]]
        self.blocks = []
        for step in self.plan:
            source = (rank - step.distance) % geometry.ring_size
            sent = next(s.send for s in make_schedule(geometry, source) if s.distance == step.distance)
            places = torch.cat([held[source][piece.start : piece.stop] for piece in sent[0]] or [held[source][:0]])
            self.blocks.append((k[:, places], v[:, places]))

    def run(self) -> None:
        sums = torch.zeros_like(self.q, dtype=torch.float32)
        lse = sums.new_full((1, HEADS, sums.shape[1]), float("-inf"))
        calls = [
            (slice(pair.q_start, pair.q_stop), block[0][:, pair.k_start : pair.k_stop],
             block[1][:, pair.k_start : pair.k_stop], Mask(SCALE, pair.left, pair.right))
            for step, block in zip(self.plan, self.blocks, strict=True)
            for pair in step.pairs
        ]  # fmt: skip
        for rows, k, v, mask in calls:
            merge(sums[:, rows], lse[:, :, rows], *self.kernel.forward(self.q[:, rows], k, v, mask))
        out = sums.to(self.q.dtype)
        dq = torch.zeros_like(sums)
        for rows, k, v, mask in calls:
            softmax = out[:, rows], lse[:, :, rows].contiguous()
            grads = self.kernel.gradients(out[:, rows], (self.q[:, rows], k, v), softmax, mask)
            dq[:, rows].add_(grads[0])
            for grad in grads[1:]:
                torch.zeros_like(grad, dtype=torch.float32).add_(grad)


def seconds(step: Callable[[], None], device: str) -> float:
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    begun = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--ring", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--kernel", default="auto")
    arguments = parser.parse_args()
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    kernel, why = select_kernel(arguments.kernel, Request(arguments.device, dtype, HEAD_DIM))
    q, k, v = (
        torch.randn(1, arguments.tokens, heads, HEAD_DIM, device=arguments.device, dtype=dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    print(f"{kernel.name} ({why}), {HEADS} query and {KV_HEADS} KV heads of {HEAD_DIM}, {arguments.tokens} tokens")
    print("| ring ranks | time of all blocks / one call (least to most) | speed |\n|---|---|---|")
    for size in arguments.ring:
        geometry = Geometry(arguments.tokens, size, "zigzag")
        ranks = [RingRank(kernel, geometry, rank, q, k, v) for rank in range(size)]

        def ring(ranks: list[RingRank] = ranks) -> None:
            for rank in ranks:
                rank.run()

        ring()
        ratios = sorted(
            seconds(ring, arguments.device) / seconds(lambda: whole(kernel, q, k, v), arguments.device)
            for _ in range(arguments.turns)
        )
        median = statistics.median(ratios)
        print(f"| {size} | {median:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) | {1 / median:.0%} |", flush=True)


if __name__ == "__main__":
    main()
