"""One rank of test_two_machines: attention over four ranks, two on each side of a network interface."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROUNDS = 3
HEAD_DIM, TOKENS = 64, 4096


def bytes_on_the_wire(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def main(store: str, rank: int, interface: str, *heads: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    found = {pair: measured(interface, tuple(map(int, pair.split(",")))) for pair in heads}
    Path(f"{store}.{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def measured(interface: str, heads: tuple[int, ...]) -> dict[str, Any]:
    """Of attention with so many query and KV heads: the bytes of this rank, and of its machine on the wire."""
    import ds_ulysses

    rank, heads = dist.get_rank(), (heads[0], heads[1])
    config = ds_ulysses.SequenceParallelConfig(sequence_parallel_size=4)
    topology = ds_ulysses.Topology.create(config, heads)
    attention = ds_ulysses.DistributedAttention(topology=topology)
    q, k, v = (torch.randn(1, TOKENS // 4, h, HEAD_DIM, requires_grad=True) for h in (heads[0], heads[1], heads[1]))
    attention(q, k, v).sum().backward()  # connections are made now
    dist.barrier()
    before = bytes_on_the_wire(interface)
    dist.barrier()
    with ds_ulysses.ledger() as book:
        for _ in range(ROUNDS):
            attention(q, k, v).sum().backward()
    dist.barrier()
    shape = ds_ulysses.AttentionShape(*heads, HEAD_DIM, TOKENS, "fp32")
    predicted = ROUNDS * sum(
        entry.bytes_sent for entry in ds_ulysses.predict(shape, topology.mesh, rank) if entry.level == "ring"
    )
    return {
        "mesh": str(topology.mesh),
        "wire": bytes_on_the_wire(interface) - before,
        "ledger": sum(entry.bytes_sent for entry in book.entries if entry.level == "ring"),
        "inside": sum(entry.bytes_sent for entry in book.entries if entry.level == "ulysses"),
        "predicted": predicted,
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
