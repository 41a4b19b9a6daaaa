"""Ring and hierarchical attention: Ulysses inside groups of consecutive ranks, a ring across them.

Fang and Zhao, "USP" (arXiv:2405.07719). A level of one rank collapses: without a Ulysses group it is the plain ring. If
the group has more ranks than KV heads, so that several would hold the same one, keys and values cross the ring as
sequence shards, once, instead of in as many copies.

Shapes: B batch, S local tokens, n = S * U tokens of a Ulysses group, H and K query and KV heads, D dim of
queries and keys, E of values.
"""

from __future__ import annotations

from torch import Tensor

from ds_ulysses.comm import scatter_channels
from ds_ulysses.mixers.softmax.buffers import keys_and_values_of_shard
from ds_ulysses.mixers.softmax.call import exchange_of
from ds_ulysses.mixers.softmax.ring import ring_attention
from ds_ulysses.mixers.softmax.ulysses import gather_heads, scatter_heads
from ds_ulysses.placement import Placement, split_heads


def hierarchical_attention(
    q: Tensor, k: Tensor, v: Tensor, placement: Placement, sinks: Tensor | None, settings: str
) -> Tensor:
    """Attend at both levels: q [B, S, H, D], k [B, S, K, D], v [B, S, K, E] -> [B, S, H, E].

    `sinks` of this rank's heads.
    """
    head_dim, value_dim = k.shape[3], v.shape[3]
    split = split_heads(q.shape[2], k.shape[2], placement.ulysses_size)
    exchange = exchange_of(split, head_dim, value_dim)
    if placement.ring_size > 1 and split.shares_kv_heads:
        local_q = scatter_channels([q.flatten(2)], exchange.q, placement)
        local_kv = keys_and_values_of_shard(k, v)
    elif placement.ulysses_size == 1:
        local_q, local_kv = q.flatten(2).transpose(0, 1), keys_and_values_of_shard(k, v)
    else:
        num_heads, num_kv_heads = split.counts(placement.ulysses_rank)
        sizes = [num_heads * head_dim, num_kv_heads * (head_dim + value_dim)]
        local_q, local_kv = scatter_heads(q, k, v, exchange, placement).split(sizes, dim=-1)
    out = gather_heads(ring_attention(local_q, local_kv, placement, sinks, settings), exchange, placement)
    return out.unflatten(-1, (q.shape[2], value_dim))
