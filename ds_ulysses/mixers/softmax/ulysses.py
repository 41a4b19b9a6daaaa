"""Ulysses: exchange sequence shards for head shards, attend over the whole sequence, exchange back.

Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509, with q, k and v in one exchange and any head counts.

Shapes: B batch, S local tokens, T = S * P tokens of the whole sequence, H query heads, K KV heads, D dim
of queries and keys, E of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_ulysses.comm import ProcessGroup, gather_channels, members, scatter_channels
from ds_ulysses.mixers.softmax.call import Call
from ds_ulysses.mixers.softmax.head_groups import head_group_attention
from ds_ulysses.mixers.softmax.local import local_attention
from ds_ulysses.placement import HeadSplit, split_heads


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, documents: Tensor | None, sinks: Tensor | None, call: Call
) -> Tensor:
    """Attention over the whole sequence: 1 all-to-all in, 1 out; as many in the backward. Times the head groups.

    q [B, S, H, D], k [B, S, K, D], v [B, S, K, E], S equal on all ranks; `documents` and `sinks` (those of this rank's
    heads) as in `local_attention`. Returns [B, S, H, E].
    """
    if call.place.head_groups > 1:
        channels = q.flatten(2), k.flatten(2), v.flatten(2)
        return head_group_attention(channels, documents, sinks, call).unflatten(-1, (call.num_heads, call.value_dim))
    qkv = scatter_heads(q, k, v, call.split, group)
    out = local_attention(qkv, documents, sinks, call)
    return gather_heads(out, call.split, call.value_dim, group)


def scatter_heads(q: Tensor, k: Tensor, v: Tensor, split: HeadSplit, group: ProcessGroup) -> Tensor:
    """[B, S, heads, dim] of q, k, v -> [T, B, H_rank * D + K_rank * (D + E)]. Without a group of several: no wire."""
    channels = [x.flatten(2) for x in (q, k, v)]
    if split.sp_size == 1:
        return torch.cat(channels, dim=-1).transpose(0, 1)
    head_dim, value_dim = k.shape[3], v.shape[3]
    ranges = [split.q_channels(head_dim), split.kv_channels(head_dim), split.kv_channels(value_dim)]
    return scatter_channels(channels, ranges, group)


def gather_heads(out: Tensor, split: HeadSplit, dim: int, group: ProcessGroup) -> Tensor:
    """[T, B, H_rank * dim] -> [B, S, H, dim]."""
    if split.sp_size == 1:
        return out.transpose(0, 1).unflatten(-1, (split.num_heads, dim))
    (channels,) = gather_channels(out, [split.q_channels(dim)], group)
    return channels.unflatten(-1, (split.num_heads, dim))


def gather_seq_scatter_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange a sequence shard for a head shard. Differentiable; the inverse is `gather_heads_scatter_seq`.

    [B, S, heads, D] -> [B, T, heads of this rank, D], or [S, hidden] -> [T, hidden of this rank]. S must be equal on
    all ranks; heads (or hidden) need not divide by P: see `HeadSplit.q_range` for who holds which.
    """
    num_heads, head_dim = (x.shape[2], x.shape[3]) if x.dim() == 4 else (x.shape[1], 1)
    ranges = [split_heads(num_heads, num_heads, members(group)[1]).q_channels(head_dim)]
    channels = x.flatten(2) if x.dim() == 4 else x[None]
    received = scatter_channels([channels], ranges, group).transpose(0, 1)
    return received.unflatten(-1, (received.shape[-1] // head_dim, head_dim)) if x.dim() == 4 else received[0]


def gather_heads_scatter_seq(x: Tensor, group: ProcessGroup, num_heads: int | None = None) -> Tensor:
    """Exchange a head shard for a sequence shard. Differentiable; the inverse is `gather_seq_scatter_heads`.

    [B, T, heads of this rank, D] -> [B, S, heads, D], or [T, hidden of this rank] -> [S, hidden]. `num_heads` is the
    number of all heads (or the whole hidden size); by default this rank's times P. Raises `ValueError` if this rank
    does not hold its share of them, or T does not divide by P.
    """
    rank, sp_size = members(group)
    local, head_dim, tokens = (x.shape[2], x.shape[3], x.shape[1]) if x.dim() == 4 else (x.shape[1], 1, x.shape[0])
    split = split_heads(num_heads or local * sp_size, num_heads or local * sp_size, sp_size)
    expected, _ = split.counts(rank)
    if local != expected or tokens % sp_size:
        raise ValueError(
            f"{tuple(x.shape)} on rank {rank} of {sp_size}: of {split.num_heads} heads this rank holds {expected}, "
            f"not {local}, or {tokens} tokens do not divide by {sp_size}. Give num_heads, and pad the sequence."
        )
    channels = (x.flatten(2) if x.dim() == 4 else x[None]).transpose(0, 1)
    (out,) = gather_channels(channels, [split.q_channels(head_dim)], group)
    return out.unflatten(-1, (split.num_heads, head_dim)) if x.dim() == 4 else out[0]
