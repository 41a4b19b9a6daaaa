"""Ulysses: exchange sequence shards for head shards, attend over the whole sequence, exchange back.

Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509, with q, k and v in one exchange and any head counts.

Shapes: B batch, S local tokens, T = S * P tokens of the whole sequence, H query heads, K KV heads, D dim
of queries and keys, E of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_ulysses.comm import ChannelTable, ProcessGroup, gather_channels, members, scatter_channels, whole_group
from ds_ulysses.mixers.softmax.call import Exchange, exchange_of
from ds_ulysses.mixers.softmax.head_groups import head_group_attention
from ds_ulysses.mixers.softmax.local import local_attention
from ds_ulysses.placement import Placement, split_heads


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, placement: Placement, sinks: Tensor | None, settings: str
) -> Tensor:
    """Attend over the whole sequence: 1 all-to-all in, 1 out; as many in the backward. Times the head groups.

    q [B, S, H, D], k [B, S, K, D], v [B, S, K, E], S equal on all ranks; `sinks` of this rank's heads or None. Returns
    [B, S, H, E].
    """
    heads = q.shape[2], v.shape[3]
    if placement.head_groups > 1:
        channels = q.flatten(2), k.flatten(2), v.flatten(2)
        return head_group_attention(channels, placement, sinks, settings).unflatten(-1, heads)
    exchange = exchange_of(split_heads(q.shape[2], k.shape[2], placement.ulysses_size), k.shape[3], v.shape[3])
    qkv = scatter_heads(q, k, v, exchange, placement)
    return gather_heads(local_attention(qkv, placement, sinks, settings), exchange, placement).unflatten(-1, heads)


def scatter_heads(q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, placement: Placement) -> Tensor:
    """Exchange [B, S, heads, dim] of q, k, v -> [T, B, H_rank * D + K_rank * (D + E)].

    Without a group of several: no wire.
    """
    channels = [x.flatten(2) for x in (q, k, v)]
    if placement.ulysses_size == 1:
        return torch.cat(channels, dim=-1).transpose(0, 1)
    return scatter_channels(channels, exchange.qkv, placement)


def gather_heads(out: Tensor, exchange: Exchange, placement: Placement) -> Tensor:
    """Exchange heads for tokens: [T, B, H_rank * E] -> [B, S, H * E]."""
    return out.transpose(0, 1) if placement.ulysses_size == 1 else gather_channels(out, exchange.out, placement)[0]


def gather_seq_scatter_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange a sequence shard for a head shard. Differentiable; the inverse is `gather_heads_scatter_seq`.

    [B, S, heads, D] -> [B, T, heads of this rank, D], or [S, hidden] -> [T, hidden of this rank]. S must be equal on
    all ranks; heads (or hidden) need not divide by P: see `HeadSplit.q_range` for who holds which.
    """
    num_heads, head_dim = (x.shape[2], x.shape[3]) if x.dim() == 4 else (x.shape[1], 1)
    everybody = whole_group(group, x.shape[1] if x.dim() == 4 else x.shape[0])
    table = ChannelTable([split_heads(num_heads, num_heads, everybody.sp_size).q_channels(head_dim)])
    channels = x.flatten(2) if x.dim() == 4 else x[None]
    received = scatter_channels([channels], table, everybody).transpose(0, 1)
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
    placement = whole_group(group, tokens // sp_size)
    (out,) = gather_channels(channels, ChannelTable([split.q_channels(head_dim)]), placement)
    return out.unflatten(-1, (split.num_heads, head_dim)) if x.dim() == 4 else out[0]
