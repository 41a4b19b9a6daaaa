"""`DistributedAttention`: what the patcher puts into each attention layer, usable on its own.

Shapes: B batch, S local tokens, T tokens of the whole sequence, H query heads, K KV heads, D dim of queries and
keys, E of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ds_ulysses.comm import ProcessGroup, Topology, everybody, members
from ds_ulysses.config import accumulation_dtype
from ds_ulysses.kernels import Mask, Request, select_kernel
from ds_ulysses.mixers.softmax.all_gather import all_gather_attention
from ds_ulysses.mixers.softmax.blocks import queries_keys_values
from ds_ulysses.mixers.softmax.call import Call, Place
from ds_ulysses.mixers.softmax.hierarchical import hierarchical_attention
from ds_ulysses.mixers.softmax.ulysses import gather_heads, scatter_heads, ulysses_attention
from ds_ulysses.placement import HeadSplit, split_heads


class DistributedAttention(nn.Module):
    """Attention over a sequence that is sharded over the ranks of a group.

    `local_attention`: None for the built-in kernels, or a callable (q, k, v, *args, **kwargs) -> out that sees
    the whole sequence of its heads, [B, T, heads, dim], and returns [B, T, H, E]. KV heads come unexpanded,
    except where a rank's query heads cut a KV group unevenly.
    `sequence_process_group`: the ranks that share a sequence, in sequence order; None means all ranks.
    `scatter_idx`, `gather_idx`: the head and sequence dims, which are 2 and 1 in [B, S, H, D].
    `kernel`: name of a built-in kernel, or "auto".
    `topology`: its strategy, groups and layout, in place of `sequence_process_group`, which means Ulysses.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor] | None = None,
        sequence_process_group: ProcessGroup | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        kernel: str = "auto",
        topology: Topology | None = None,
    ) -> None:
        super().__init__()
        if (scatter_idx, gather_idx) != (2, 1):
            raise ValueError(
                f"scatter_idx={scatter_idx}, gather_idx={gather_idx}: tensors are [batch, tokens, heads, head_dim], "
                f"so heads are scattered from dim 2 and tokens gathered in dim 1. Transpose sequence-first tensors."
            )
        self.local_attention = local_attention
        self.topology = topology
        self.kernel = kernel
        if topology is not None and sequence_process_group is not None:
            raise ValueError("sequence_process_group would be ignored: topology brings its own. Leave one of them out.")
        if topology is None:
            self.strategy, self.group = "ulysses", sequence_process_group or everybody()
            size, rank = members(self.group)[::-1]
            self.place = Place(self.group.group_name, size, rank, "", 1, 0, "contiguous", 1, "fp32")
        else:
            self.strategy, self.group, self.place = topology.mesh.strategy, topology.ulysses_group, _place(topology)
        if local_attention is not None and (self.strategy != "ulysses" or self.place.head_groups > 1):
            raise ValueError(
                f"A local_attention of your own sees the whole sequence of all its heads, which {self.strategy!r} in "
                f'{self.place.head_groups} head groups never brings together. Use "strategy": "ulysses" in one group.'
            )
        self.has_exchanged = False
        """Set by every forward: how a patched model proves that none of its layers was bypassed."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """query [B, S, H, D], key [B, S, K, D], value [B, S, K, E] -> [B, S, H, E]. S must be equal on all ranks.

        Which tokens a rank holds, the topology's layout says: see `token_places`.

        With the built-in kernels, the further arguments are those of `attend`; otherwise they go to
        `local_attention`. Raises `ValueError` for shapes that do not fit together.
        """
        _check_shapes(query, key, value)
        self.has_exchanged = True
        if self.local_attention is None:
            return self.attend(query, key, value, *args, **kwargs)
        split = split_heads(query.shape[2], key.shape[2], members(self.group)[1])
        qkv = scatter_heads(query, key, value, split, self.group)
        q, k, v = _separate(qkv, split, members(self.group)[0], (key.shape[3], value.shape[3]))
        # A rank without heads still takes part in both exchanges, but has nothing to attend with.
        local = self.local_attention(q, k, v, *args, **kwargs) if q.shape[2] else q[..., :0]
        return gather_heads(local.transpose(0, 1).flatten(2), split, value.shape[3], self.group)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None = None,
        documents: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend with a built-in kernel; causal with scale 1/sqrt(D) if there is no `mask`.

        `documents`: int32 tensor [N, 3] on the CPU of (row, start, stop) in the whole sequence, or None. `sinks`: [H],
        a logit for each head that takes part in the softmax, the same on all ranks; its gradient here is that of this
        rank's tokens or heads, and summed over the ranks that of one process, like every parameter's.
        """
        mask = mask or Mask(scale=query.shape[3] ** -0.5)
        request = Request(query.device.type, query.dtype, max(query.shape[3], value.shape[3]), bool(mask.softcap))
        kernel, _ = select_kernel(self.kernel, request)
        call = Call(
            query.shape[2], key.shape[2], key.shape[3], value.shape[3], mask.scale, mask.left, mask.right, mask.softcap,
            kernel.name, self.place,
        )  # fmt: skip
        if sinks is not None:
            sinks = sinks[slice(*call.split.q_range(self.place.ulysses_rank))].to(accumulation_dtype(query.dtype))
        if self.strategy == "ulysses":
            return ulysses_attention(query, key, value, self.group, documents, sinks, call)
        if self.strategy == "all_gather":
            return all_gather_attention(query, key, value, documents, sinks, call)
        return hierarchical_attention(query, key, value, self.group, documents, sinks, call)

    def extra_repr(self) -> str:
        sizes = f"ulysses_size={self.place.ulysses_size}, ring_size={self.place.ring_size}"
        return f"strategy={self.strategy!r}, {sizes}, kernel={self.kernel!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedAttention:
        """Process groups are handles: a copied layer still talks over the same ones."""
        group = self.group if self.topology is None else None
        return type(self)(self.local_attention, group, kernel=self.kernel, topology=self.topology)


def _place(topology: Topology) -> Place:
    mesh = topology.mesh
    return Place(
        topology.ulysses_group.group_name, mesh.ulysses_size, topology.ulysses_rank,
        topology.ring_group.group_name, mesh.ring_size, topology.ring_rank,
        mesh.layout, mesh.head_groups, mesh.grad_dtype,
    )  # fmt: skip


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    fits = query.dim() == key.dim() == value.dim() == 4 and key.shape[:3] == value.shape[:3]
    if not fits or query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}: expected [batch, tokens, "
            f"heads, head_dim] with equal batch and tokens, one head_dim of query and key, and as many values as keys."
        )


def _separate(qkv: Tensor, split: HeadSplit, rank: int, dims: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """[T, B, channels] -> q [B, T, H, D], k [B, T, K, D], v [B, T, K, E]; KV expanded if their groups are uneven."""
    q, k, v = queries_keys_values(qkv, split.counts(rank), dims)
    if len(split.runs(rank)) > 1:
        owners = torch.arange(*split.q_range(rank), device=qkv.device) // split.group_size - split.kv_range(rank)[0]
        k, v = k.index_select(2, owners), v.index_select(2, owners)
    return q, k, v
