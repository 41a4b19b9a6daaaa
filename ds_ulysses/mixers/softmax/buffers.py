"""Views of the buffers that travel: token-major as the exchange delivers them, by heads as kernels take them.

Shapes: N tokens of a buffer, B batch, H and K query and KV heads of this rank, D dim of queries and keys, E of values.
    buffer   [N, B, channels]    q: H * D; keys and values side by side: K * D + K * E; out: H * E
    heads    [B, N, H, D or E]   a view of it
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_ulysses.kernels import Triple


def heads(buffer: Tensor, dim: int) -> Tensor:
    """View [N, B, channels] as [B, N, heads, dim]."""
    return buffer.transpose(0, 1).unflatten(-1, (buffer.shape[-1] // dim, dim))


def queries_keys_values(buffer: Tensor, counts: tuple[int, int], dims: tuple[int, int]) -> Triple:
    """View [N, B, H * D + K * (D + E)] of `counts` H, K as q [B, N, H, D], k [B, N, K, D], v [B, N, K, E]."""
    (num_heads, num_kv_heads), (head_dim, value_dim) = counts, dims
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * value_dim]
    q, k, v = buffer.split(sizes, dim=-1)
    return heads(q, head_dim), heads(k, head_dim), heads(v, value_dim)


def keys_and_values(buffer: Tensor, dims: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """View [N, B, K * (D + E)] as k [B, N, K, D] and v [B, N, K, E]."""
    _, k, v = queries_keys_values(buffer, (0, buffer.shape[-1] // sum(dims)), dims)
    return k, v


def keys_and_values_of_shard(k: Tensor, v: Tensor) -> Tensor:
    """Join k [B, S, K, D] and v [B, S, K, E] -> [S, B, K * (D + E)], in one copy."""
    return torch.cat([k.flatten(2).transpose(0, 1), v.flatten(2).transpose(0, 1)], dim=-1)
