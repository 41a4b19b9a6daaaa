"""`DistributedAttention`: what the patcher puts into each attention layer, usable on its own.

Shapes: B batch, S local tokens, T tokens of the whole sequence, H query heads, K KV heads, D dim of queries and
keys, E of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_ulysses.comm import ProcessGroup, Topology, everybody, whole_group
from ds_ulysses.config import accumulation_dtype
from ds_ulysses.kernels import Mask, Request, select_kernel
from ds_ulysses.mixers.contract import Mixer
from ds_ulysses.mixers.softmax.all_gather import all_gather_attention
from ds_ulysses.mixers.softmax.buffers import queries_keys_values
from ds_ulysses.mixers.softmax.call import Settings, exchange_of
from ds_ulysses.mixers.softmax.hierarchical import hierarchical_attention
from ds_ulysses.mixers.softmax.ulysses import gather_heads, scatter_heads, ulysses_attention
from ds_ulysses.placement import HeadSplit, Placement, split_heads


class DistributedAttention(Mixer):
    """Attention over a sequence that is sharded over the ranks of a group.

    `local_attention`: None for the built-in kernels, or a callable (q, k, v, *args, **kwargs) -> out that sees
    the whole sequence of its heads, [B, T, heads, dim], and returns [B, T, H, E]. KV heads come unexpanded,
    except where a rank's query heads cut a KV group unevenly.
    `sequence_process_group`: the ranks that share a sequence, in sequence order; None means all ranks.
    `scatter_idx`, `gather_idx`: the head and sequence dims, which are 2 and 1 in [B, S, H, D].
    `kernel`: name of a built-in kernel, or "auto".
    `topology`: its strategy, groups and layout, in place of `sequence_process_group`, which means Ulysses.
    """

    kind = "softmax"
    exchanges = ("query", "key", "value", "output")
    carries = None

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
        if topology is not None and sequence_process_group is not None:
            raise ValueError("sequence_process_group would be ignored: topology brings its own. Leave one of them out.")
        self.local_attention, self.topology, self.kernel = local_attention, topology, kernel
        self.group = sequence_process_group or everybody() if topology is None else topology.ulysses_group
        self.strategy = "ulysses" if topology is None else topology.mesh.strategy
        head_groups = 1 if topology is None else topology.mesh.head_groups
        if local_attention is not None and (self.strategy != "ulysses" or head_groups > 1):
            raise ValueError(
                f"A local_attention of your own sees the whole sequence of all its heads, which {self.strategy!r} in "
                f'{head_groups} head groups never brings together. Use "strategy": "ulysses" in one group.'
            )
        self._whole_rows: Placement | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attend with query [B, S, H, D] to key [B, S, K, D] and value [B, S, K, E] -> [B, S, H, E].

        S must be equal on all ranks. Which tokens a rank holds, the topology's layout says: see
        `Placement.token_places`.

        With the built-in kernels, the further arguments are those of `attend`; otherwise they go to
        `local_attention`. Raises `ValueError` for shapes that do not fit together.
        """
        _check_shapes(query, key, value)
        self.has_mixed = True
        if self.local_attention is None:
            return self.attend(query, key, value, *args, **kwargs)
        placement = self.whole_rows(query.shape[1])
        split = split_heads(query.shape[2], key.shape[2], placement.ulysses_size)
        exchange = exchange_of(split, key.shape[3], value.shape[3])
        qkv = scatter_heads(query, key, value, exchange, placement)
        q, k, v = _separate(qkv, split, placement.ulysses_rank, (key.shape[3], value.shape[3]))
        # A rank without heads still takes part in both exchanges, but has nothing to attend with.
        local = self.local_attention(q, k, v, *args, **kwargs) if q.shape[2] else q[..., :0]
        out = gather_heads(local.transpose(0, 1).flatten(2), exchange, placement)
        return out.unflatten(-1, (split.num_heads, value.shape[3]))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None = None,
        placement: Placement | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend with a built-in kernel; causal with scale 1/sqrt(D) if there is no `mask`.

        `placement`: what `shard_batch` found, or `Topology.place`; None: every row is one document. `sinks`: [H], a
        logit for each head that takes part in the softmax, the same on all ranks; its gradient here is that of this
        rank's tokens or heads, and summed over the ranks that of one process, like every parameter's.
        """
        mask = mask or Mask(scale=query.shape[3] ** -0.5)
        request = Request(query.device.type, query.dtype, max(query.shape[3], value.shape[3]), bool(mask.softcap))
        kernel, _ = select_kernel(self.kernel, request)
        if placement is None:
            placement = self.whole_rows(query.shape[1])
        heads = query.shape[2], key.shape[2], key.shape[3], value.shape[3]
        settings = Settings(*heads, mask.scale, mask.left, mask.right, mask.softcap, kernel.name)
        if sinks is not None:
            split = split_heads(query.shape[2], key.shape[2], placement.ulysses_size)
            sinks = sinks[slice(*split.q_range(placement.ulysses_rank))].to(accumulation_dtype(query.dtype))
        return STRATEGIES[self.strategy](query, key, value, placement, sinks, settings.encode())

    @torch.compiler.disable  # it makes an object that compiled code can only be handed
    def whole_rows(self, num_tokens: int) -> Placement:
        """Return the placement of rows of one document each, of which this rank holds `num_tokens`."""
        last = self._whole_rows
        if last is None or last.num_tokens != num_tokens * last.sp_size:
            if self.topology is None:
                last = whole_group(self.group, num_tokens)
            else:
                last = self.topology.place(num_tokens * self.topology.sp_size)
            self._whole_rows = last
        return last

    def extra_repr(self) -> str:
        """Return what `repr` shows of the layer."""
        mesh = "ulysses" if self.topology is None else str(self.topology.mesh)
        return f"{mesh}, kernel={self.kernel!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedAttention:
        """Process groups are handles: a copied layer still talks over the same ones."""
        group = self.group if self.topology is None else None
        return type(self)(self.local_attention, group, kernel=self.kernel, topology=self.topology)


STRATEGIES = {
    "ulysses": ulysses_attention,
    "ring": hierarchical_attention,
    "all_gather": all_gather_attention,
    "hierarchical": hierarchical_attention,
}


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
        owners = torch.arange(*split.q_range(rank), device=qkv.device) // split.queries_per_kv - split.kv_range(rank)[0]
        k, v = k.index_select(2, owners), v.index_select(2, owners)
    return q, k, v
