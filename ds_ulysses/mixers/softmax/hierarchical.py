"""Ring and hierarchical attention: Ulysses inside groups of consecutive ranks, a ring across them.

Fang and Zhao, "USP" (arXiv:2405.07719). A level of one rank collapses: without a Ulysses group it is the plain ring. If
the group has more ranks than KV heads, so that several would hold the same one, keys and values cross the ring as
sequence shards, once, instead of in as many copies.

Shapes: B batch, S local tokens, n = S * U tokens of a Ulysses group, H and K query and KV heads, D dim of
queries and keys, E of values.
"""

from __future__ import annotations

from torch import Tensor

from ds_ulysses.comm import ProcessGroup, scatter_channels
from ds_ulysses.mixers.softmax.blocks import keys_and_values_of_shard
from ds_ulysses.mixers.softmax.call import Call
from ds_ulysses.mixers.softmax.ring import ring_attention
from ds_ulysses.mixers.softmax.ulysses import gather_heads, scatter_heads


def hierarchical_attention(
    q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, documents: Tensor | None, sinks: Tensor | None, call: Call
) -> Tensor:
    """q [B, S, H, D], k [B, S, K, D], v [B, S, K, E] -> [B, S, H, E]; `group`: Ulysses; `sinks` of this rank."""
    split = call.split
    if call.spreads_keys:
        local_q = scatter_channels([q.flatten(2)], [split.q_channels(call.head_dim)], group)
        local_kv = keys_and_values_of_shard(k, v)
    elif split.sp_size == 1:
        local_q, local_kv = q.flatten(2).transpose(0, 1), keys_and_values_of_shard(k, v)
    else:
        num_heads, num_kv_heads = call.local_heads
        sizes = [num_heads * call.head_dim, num_kv_heads * call.kv_dim]
        local_q, local_kv = scatter_heads(q, k, v, split, group).split(sizes, dim=-1)
    out = ring_attention(local_q, local_kv, documents, sinks, call)
    return gather_heads(out, split, call.value_dim, group)
