"""Which strategy, and how many ranks at each of its two levels, from the config, the heads and the nodes.

    strategy       Megatron's name   ulysses_size x ring_size
    ulysses        a2a               sp x 1
    ring           p2p               1 x sp
    all_gather     all_gather        1 x sp
    hierarchical   a2a+p2p           u x r, u * r = sp

Formulas: bytes per rank, layer and token of its shard for a causal zigzag, forward and backward, in heads (2 bytes x
head_dim, gradients of keys and values twice that). They are those of "USP" (arXiv:2405.07719), table 2, with what the
schedule leaves out left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ds_ulysses.config import SequenceParallelConfig
from ds_ulysses.placement.heads import HeadSplit

SLOW = 8.0
"""What a byte between nodes costs in bytes within one: 450 GB/s of NVLink to 50 GB/s of InfiniBand, per GPU."""
WORTHWHILE = 0.75
"""A ring takes more kernel calls and messages: it must save a quarter of the bytes against Ulysses within a node."""
UNEVEN = 1.25
"""Heads of the busiest rank over the mean from which a smaller Ulysses group is looked for."""


class Machine(NamedTuple):
    """The facts that the choice depends on besides the config."""

    ranks_per_node: int
    heads: tuple[int, int] | None = None
    """Query and KV heads, if they are known yet."""


@dataclass(frozen=True)
class Mesh:
    """The way a sequence-parallel group works together."""

    strategy: str
    ulysses_size: int
    ring_size: int
    layout: str
    head_groups: int = 1
    grad_dtype: str = "fp32"
    reason: str = ""

    def __str__(self) -> str:
        levels = f" {self.ulysses_size} x {self.ring_size}" if self.strategy == "hierarchical" else ""
        return f"{self.strategy}{levels}, {self.layout} layout ({self.reason})"


def choose_mesh(config: SequenceParallelConfig, machine: Machine) -> Mesh:
    """Fill in what the config leaves open. Raises `ValueError` if its sizes contradict each other."""
    sizes, product = _candidates(config), config.sequence_parallel_size
    if not sizes:
        raise ValueError(
            f'"strategy" is {config.strategy!r} with "ulysses_size" {config.ulysses_size!r} and "ring_size" '
            f'{config.ring_size!r}, but the sizes must multiply to "sequence_parallel_size", {product}, and '
            f'"ulysses" has no ring, "ring" and "all_gather" nothing else. Leave sizes out, or correct them.'
        )
    (ulysses_size, ring_size), reason = _choose(sizes, config.packed, machine)
    strategy = config.strategy
    if strategy == "auto":
        strategy = "ulysses" if ring_size == 1 else "ring" if ulysses_size == 1 else "hierarchical"
    if config.ulysses_head_groups > 1 and ring_size > 1:
        raise ValueError(
            f'"ulysses_head_groups" is {config.ulysses_head_groups}, but only "strategy": "ulysses" travels in head '
            f'groups, and this is {strategy}, so it would be ignored. Leave it out, or set "strategy" to "ulysses".'
        )
    layout = ("zigzag" if ring_size > 1 else "contiguous") if config.layout == "auto" else config.layout
    return Mesh(strategy, ulysses_size, ring_size, layout, config.ulysses_head_groups, config.grad_dtype, reason)


def _candidates(config: SequenceParallelConfig) -> list[tuple[int, int]]:
    """(ulysses_size, ring_size) that the config allows, the largest ulysses_size first."""
    size = config.sequence_parallel_size
    pairs = [(u, size // u) for u in range(size, 0, -1) if size % u == 0]
    pairs = [(u, r) for u, r in pairs if config.ulysses_size in ("auto", u) and config.ring_size in ("auto", r)]
    if size == 1:
        return pairs
    allowed = {
        "ulysses": lambda u, r: r == 1,
        "ring": lambda u, r: u == 1,
        "all_gather": lambda u, r: u == 1,
        "hierarchical": lambda u, r: u > 1 and r > 1,
        "auto": lambda u, r: True,
    }[config.strategy]
    return [pair for pair in pairs if allowed(*pair)]


def _choose(sizes: list[tuple[int, int]], packed: bool, machine: Machine) -> tuple[tuple[int, int], str]:
    """The pair to take, and why."""
    if len(sizes) == 1:
        return sizes[0], "set in the config" if sizes[0] != (1, 1) else "one rank"
    inside = [pair for pair in sizes if pair[0] <= machine.ranks_per_node] or sizes[-1:]
    if machine.heads is None:
        return inside[0], "the largest Ulysses group within a node; head counts were not given"
    even = [pair for pair in sizes if HeadSplit(*machine.heads, pair[0]).imbalance < UNEVEN] or sizes[-1:]
    if packed:
        best = next((pair for pair in even if pair in inside), even[-1])
        return best, "packed documents: the largest Ulysses group within a node that shares the heads evenly"
    best = min(even, key=lambda pair: cost(pair, machine))
    near = [pair for pair in even if pair in inside and WORTHWHILE * cost(pair, machine) <= cost(best, machine)]
    best = near[0] if near else best
    prices = ", ".join(f"{u} x {r}: {cost((u, r), machine):.0f}" for u, r in sizes)
    uneven = f"; without the {len(sizes) - len(even)} of most uneven heads" if len(even) < len(sizes) else ""
    return best, f"weighed bytes of ulysses x ring {prices}{uneven}"


def cost(sizes: tuple[int, int], machine: Machine) -> float:
    """Count the bytes of a layer in heads per token, those between nodes weighing `SLOW` times those within one."""
    assert machine.heads is not None
    (ulysses_size, ring_size), (num_heads, num_kv_heads) = sizes, machine.heads
    split, node = HeadSplit(num_heads, num_kv_heads, ulysses_size), machine.ranks_per_node
    held = split.num_held
    others = (ulysses_size - 1) / ulysses_size
    exchange = 4 * (num_heads + held) * others
    fetched = 0.75 * (ring_size - 1)  # blocks; again in the backward, but for the parked one; their gradients in fp32
    again = fetched - 1 + 0.5 / ring_size
    ring = 2 * num_kv_heads * (fetched + again + 2 * fetched) if ring_size > 1 else 0.0
    if split.shares_kv_heads and ring_size > 1:  # keys are spread over the group at every step, forward and twice back
        exchange += 2 * others * held * (ring_size - 1) * 4
    far_exchange = max(ulysses_size - node, 0) / max(ulysses_size - 1, 1)
    near = max(node // ulysses_size, 1)
    far_ring = max(ring_size - near, 0) / max(ring_size - 1, 1)
    return exchange * _weight(far_exchange) + ring * _weight(far_ring)


def _weight(share_between_nodes: float) -> float:
    return 1 + (SLOW - 1) * share_between_nodes
