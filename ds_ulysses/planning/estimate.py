"""Memory and time of a training step, from sizes alone: bf16, flash kernels, AdamW, tiled loss, a row a micro-batch.

For N weights, W ranks, rows of T tokens, S = T / sp_size of them on a rank, L layers of width h, f and V of the MLP and
the vocabulary, H and K query and KV heads of D channels; bytes of one rank:

    weights, gradients, optimizer   2 N, 4 N, 12 N, each over W from the ZeRO stage on that cuts it
    gathered weights                ZeRO-3: two layers and the output layer, 2 bytes each
    kept activations                2 L h S with gradient checkpointing
    working set of a layer          8 f S in the MLP, or 4 * 2 (2 H + 2 max(K, U)) D S in attention over U Ulysses ranks
    loss                            8 V for each token of a tile, and 4 V h for the gradient of the output layer
    runtime                         3 GiB: context of the device, buffers of communication

Time: operations at 60 % of the peak in matrix products, at 58 % in attention, with everything computed once more in the
backward; then what the exchanges send, and ZeRO-3's gathering as far as it takes longer than all of that. Attention in
pieces of n tokens, as a ring takes them, is n / (n + 1300) as fast: what flash kernels on an H100 lose between 64K and
2K ("DistCA", arXiv:2510.18121, its measured table). The shares, the factor 4 and the runtime are fitted to published
runs, which a test compares with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_ulysses.placement import Mesh
from ds_ulysses.planning.predict import AttentionShape, predict

GIB = 2**30
RUNTIME = 3 * GIB


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model."""

    num_weights: int
    num_active: float
    """Weights that a token is multiplied with, the output layer among them."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Of what a token meets in the MLP, all its experts together."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


@dataclass(frozen=True)
class Hardware:
    """The figures of one GPU, and of the links to others, in bytes per second that a rank reaches."""

    memory: float = 79.6 * GIB
    peak_flops: float = 989e12
    node_bandwidth: float = 300e9
    network_bandwidth: float = 45e9
    gpus_per_node: int = 8

    def bandwidth(self, num_ranks: int) -> float:
        """Return the bandwidth between so many consecutive ranks, which are on one node or not."""
        return self.node_bandwidth if num_ranks <= self.gpus_per_node else self.network_bandwidth


@dataclass(frozen=True)
class Setup:
    """The way in which a step is run."""

    num_ranks: int
    tokens: int
    mesh: Mesh
    zero_stage: int = 3
    offload: bool = False
    """The optimizer lives in the host's memory."""
    tile_size: int = 1024

    @property
    def sp_size(self) -> int:
        """The number of ranks that share a sequence."""
        return self.mesh.ulysses_size * self.mesh.ring_size

    @property
    def shard(self) -> int:
        """The tokens of a rank."""
        return -(-self.tokens // self.sp_size)


def memory(model: ModelShape, setup: Setup) -> dict[str, float]:
    """Return the bytes of a rank at its peak, by part."""
    ranks = setup.num_ranks
    sharded = [ranks if setup.zero_stage >= stage else 1 for stage in (1, 2, 3)]
    output_layer = model.vocab_size * model.hidden_size
    layer = (model.num_weights - 2 * output_layer) / model.num_layers
    heads = 2 * model.num_heads + 2 * max(model.num_kv_heads, setup.mesh.ulysses_size)
    return {
        "weights": 2 * model.num_weights / sharded[2],
        "gradients": 4 * model.num_weights / sharded[1],
        "optimizer": 0.0 if setup.offload else 12 * model.num_weights / sharded[0],
        "gathered weights": 2 * (2 * layer + output_layer) if setup.zero_stage == 3 else 0.0,
        "kept activations": 2 * model.num_layers * model.hidden_size * setup.shard,
        "working set of a layer": max(8 * model.intermediate_size, 8 * heads * model.head_dim) * setup.shard,
        "loss": 8 * model.vocab_size * min(setup.tile_size, setup.shard) + 4 * output_layer,
        "runtime": RUNTIME,
    }


def step_time(model: ModelShape, setup: Setup, hardware: Hardware) -> dict[str, float]:
    """Return the seconds of a micro-batch, forward and backward, by part; a causal row that is one document."""
    products = 8 * model.num_active * setup.shard
    attention = 4.5 * model.num_layers * 2 * setup.tokens * setup.shard * model.num_heads * model.head_dim
    piece = setup.tokens / (
        2 * setup.mesh.ring_size if setup.mesh.ring_size > 1 else 1
    )  # a ring's zigzag has two a rank
    exchange = sum(
        size / hardware.bandwidth(setup.mesh.ulysses_size if level == "ulysses" else setup.sp_size)
        for level, size in sent(model, setup).items()
    )
    times = {
        "matrix products": products / (0.6 * hardware.peak_flops),
        "attention": attention / (0.58 * hardware.peak_flops * piece / (piece + 1300)),
        "exchange": exchange,
    }
    share = (setup.num_ranks - 1) / setup.num_ranks
    gathered = 3 * 2 * model.num_weights * share if setup.zero_stage == 3 else 0.0
    gathering = gathered / hardware.bandwidth(setup.num_ranks)
    return times | {"ZeRO beyond that": max(0.0, gathering - sum(times.values()))}


def sent(model: ModelShape, setup: Setup) -> dict[str, float]:
    """Count the bytes that a rank sends in a micro-batch, by level; the forward's twice, as it is computed again."""
    shape = AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, setup.shard * setup.sp_size, "bf16")
    entries = predict(shape, setup.mesh)
    return {
        level: sum(e.bytes_sent * (2 if e.direction == "forward" else 1) for e in entries if e.level == level)
        * model.num_layers
        for level in sorted({entry.level for entry in entries})
    }


def longest_row(model: ModelShape, setup: Setup, hardware: Hardware) -> int:
    """Return the tokens of the longest row that fits; 0 if not even a tile for each rank does.

    Memory is linear from there on.
    """
    at, further = (
        sum(memory(model, replace(setup, tokens=n * setup.tile_size * setup.sp_size)).values()) for n in (1, 2)
    )
    tiles = 1 + (hardware.memory - at) / (further - at)
    return int(tiles * setup.tile_size) * setup.sp_size if tiles >= 1 else 0
