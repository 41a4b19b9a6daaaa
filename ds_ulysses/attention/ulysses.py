"""Ulysses: exchange sequence shards for head shards, attend over the whole sequence, exchange back.

Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509, with q, k and v in one exchange and any head counts.

Shapes: B batch, S local tokens, T = S * P tokens of the whole sequence, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_ulysses.attention.local import local_attention
from ds_ulysses.collectives import gather_channels, scatter_channels
from ds_ulysses.heads import HeadSplit, split_heads
from ds_ulysses.kernels import Mask
from ds_ulysses.ledger import Entry


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, mask: Mask, documents: Tensor | None, kernel: str
) -> Tensor:
    """Attention over the whole sequence: 1 all-to-all in, 1 out; as many in the backward.

    q [B, S, H, D], k and v [B, S, K, D], S equal on all ranks; `documents` as in `local_attention`.
    Returns [B, S, H, D].
    """
    split = split_heads(q.shape[2], k.shape[2], dist.get_world_size(group))
    qkv = scatter_heads(q, k, v, split, group)
    out = local_attention(qkv, split.runs(dist.get_rank(group)), mask, documents, kernel)
    return gather_heads(out, split, q.shape[3], group)


def scatter_heads(q: Tensor, k: Tensor, v: Tensor, split: HeadSplit, group: ProcessGroup) -> Tensor:
    """[B, S, heads, D] of q, k and v -> [T, B, (H_rank + 2 * K_rank) * D]. Without a group of several: no wire."""
    channels = [x.flatten(2) for x in (q, k, v)]
    if split.sp_size == 1:
        return torch.cat(channels, dim=-1).transpose(0, 1)
    return scatter_channels(channels, split.channel_ranges(q.shape[3]), group)


def gather_heads(out: Tensor, split: HeadSplit, head_dim: int, group: ProcessGroup) -> Tensor:
    """[T, B, H_rank * D] -> [B, S, H, D]."""
    if split.sp_size == 1:
        return out.transpose(0, 1).unflatten(-1, (split.num_heads, head_dim))
    (channels,) = gather_channels(out, split.channel_ranges(head_dim)[:1], group)
    return channels.unflatten(-1, (split.num_heads, head_dim))


def gather_seq_scatter_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange a sequence shard for a head shard. Differentiable; the inverse is `gather_heads_scatter_seq`.

    [B, S, heads, D] -> [B, T, heads of this rank, D], or [S, hidden] -> [T, hidden of this rank]. S must be equal on
    all ranks; heads (or hidden) need not divide by P: see `HeadSplit.q_range` for who holds which.
    """
    num_heads, head_dim = (x.shape[2], x.shape[3]) if x.dim() == 4 else (x.shape[1], 1)
    ranges = split_heads(num_heads, num_heads, dist.get_world_size(group)).channel_ranges(head_dim)[:1]
    channels = x.flatten(2) if x.dim() == 4 else x[None]
    received = scatter_channels([channels], ranges, group).transpose(0, 1)
    return received.unflatten(-1, (received.shape[-1] // head_dim, head_dim)) if x.dim() == 4 else received[0]


def gather_heads_scatter_seq(x: Tensor, group: ProcessGroup, num_heads: int | None = None) -> Tensor:
    """Exchange a head shard for a sequence shard. Differentiable; the inverse is `gather_seq_scatter_heads`.

    [B, T, heads of this rank, D] -> [B, S, heads, D], or [T, hidden of this rank] -> [S, hidden]. `num_heads` is the
    number of all heads (or the whole hidden size); by default this rank's times P. Raises `ValueError` if this rank
    does not hold its share of them, or T does not divide by P.
    """
    sp_size, rank = dist.get_world_size(group), dist.get_rank(group)
    local, head_dim, tokens = (x.shape[2], x.shape[3], x.shape[1]) if x.dim() == 4 else (x.shape[1], 1, x.shape[0])
    split = split_heads(num_heads or local * sp_size, num_heads or local * sp_size, sp_size)
    expected, _ = split.counts(rank)
    if local != expected or tokens % sp_size:
        raise ValueError(
            f"{tuple(x.shape)} on rank {rank} of {sp_size}: of {split.num_heads} heads this rank holds {expected}, "
            f"not {local}, or {tokens} tokens do not divide by {sp_size}. Give num_heads, and pad the sequence."
        )
    channels = (x.flatten(2) if x.dim() == 4 else x[None]).transpose(0, 1)
    (out,) = gather_channels(channels, split.channel_ranges(head_dim)[:1], group)
    return out.unflatten(-1, (split.num_heads, head_dim)) if x.dim() == 4 else out[0]


def predict(
    split: HeadSplit, rank: int, batch_size: int, local_tokens: int, head_dim: int, dtype: torch.dtype
) -> list[Entry]:
    """What the ledger of `rank` will say of one attention layer, forward and backward, from shapes alone.

    Bytes sent, for u = batch_size * local_tokens * head_dim * itemsize, q_j and k_j heads of rank j:
    sum over j != rank of (q_j + 2 k_j) u on the way in, (P - 1) q_rank u on the way out; the backward sends the
    gradients of both, each in the other direction.
    """
    unit = batch_size * local_tokens * head_dim * dtype.itemsize
    others = [j for j in range(split.sp_size) if j != rank]
    q, kv = zip(*map(split.counts, range(split.sp_size)), strict=True)
    scatter_qkv = sum(q[j] + 2 * kv[j] for j in others) * unit
    gather_out = len(others) * q[rank] * unit
    scatter_dout = sum(q[j] for j in others) * unit
    gather_dqkv = len(others) * (q[rank] + 2 * kv[rank]) * unit
    if not others:
        return []
    return [
        Entry("all_to_all", "ulysses", dtype, scatter_qkv, "forward"),
        Entry("all_to_all", "ulysses", dtype, gather_out, "forward"),
        Entry("all_to_all", "ulysses", dtype, scatter_dout, "backward"),
        Entry("all_to_all", "ulysses", dtype, gather_dqkv, "backward"),
    ]
