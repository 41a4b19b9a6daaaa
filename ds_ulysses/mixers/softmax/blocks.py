"""One kernel call at a time: from the pairs of a plan to views of the buffers, and back into them.

Buffers are token-major as the exchange delivers them; kernels see views.

Shapes: N tokens of a buffer, B batch, H and K query and KV heads of this rank, D dim of queries and keys, E of values.
    buffer   [N, B, channels]    q: H * D; keys and values side by side: K * D + K * E; out: H * E
    heads    [B, N, H, D or E]   a view of it
    lse      [B, H, N]
A block of keys that was put together from several rows has B = 1, and pairs say where in it a row's keys are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ulysses.config import accumulation_dtype
from ds_ulysses.kernels import Mask, Triple
from ds_ulysses.mixers.softmax.call import Call
from ds_ulysses.placement import HeadRun, Pair


class Block(NamedTuple):
    """Index of one kernel call in heads views, and its mask."""

    rows: slice
    key_rows: slice
    queries: slice
    keys: slice
    q_heads: slice
    kv_heads: slice
    mask: Mask

    def of_q(self, x: Tensor) -> Tensor:
        return x[self.rows, self.queries, self.q_heads]

    def of_kv(self, x: Tensor) -> Tensor:
        return x[self.key_rows, self.keys, self.kv_heads]

    def of_lse(self, x: Tensor) -> Tensor:
        return x[self.rows, self.q_heads, self.queries]

    def of_qkv(self, x: Triple) -> Triple:
        return self.of_q(x[0]), self.of_kv(x[1]), self.of_kv(x[2])


def blocks(pairs: Iterable[Pair], runs: Iterable[HeadRun], call: Call, packed: bool, joined: bool) -> Iterator[Block]:
    """The kernel calls of these pairs. `packed`: rows differ. `joined`: keys of all rows stand in one."""
    for pair in pairs:
        rows = slice(pair.row, pair.row + 1) if packed else slice(None)
        mask = Mask(call.scale, pair.left, pair.right, call.softcap)
        for run in runs:
            yield Block(
                rows,
                slice(None) if joined else rows,
                slice(pair.q_start, pair.q_stop),
                slice(pair.k_start, pair.k_stop),
                slice(run.q_start, run.q_stop),
                slice(run.kv_start, run.kv_stop),
                mask,
            )


def heads(buffer: Tensor, dim: int) -> Tensor:
    """[N, B, channels] -> [B, N, heads, dim], a view."""
    return buffer.transpose(0, 1).unflatten(-1, (buffer.shape[-1] // dim, dim))


def queries_keys_values(buffer: Tensor, counts: tuple[int, int], dims: tuple[int, int]) -> Triple:
    """[N, B, H * D + K * (D + E)] of `counts` H, K -> q [B, N, H, D], k [B, N, K, D], v [B, N, K, E], views."""
    (num_heads, num_kv_heads), (head_dim, value_dim) = counts, dims
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * value_dim]
    q, k, v = buffer.split(sizes, dim=-1)
    return heads(q, head_dim), heads(k, head_dim), heads(v, value_dim)


def keys_and_values(buffer: Tensor, dims: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """[N, B, K * (D + E)] -> k [B, N, K, D] and v [B, N, K, E], views."""
    _, k, v = queries_keys_values(buffer, (0, buffer.shape[-1] // sum(dims)), dims)
    return k, v


def keys_and_values_of_shard(k: Tensor, v: Tensor) -> Tensor:
    """k [B, S, K, D] and v [B, S, K, E] -> [S, B, K * (D + E)], in one copy."""
    return torch.cat([k.flatten(2).transpose(0, 1), v.flatten(2).transpose(0, 1)], dim=-1)


def attend_once(q: Tensor, todo: Sequence[tuple[Block, Tensor, Tensor]], call: Call) -> tuple[Tensor, Tensor]:
    """Run kernel calls of which no two share queries: out as a buffer [N, B, H * E], and lse [B, H, N].

    `q` [B, N, H, D] is a view of a buffer; each block comes with the k and v that it indexes. Queries in none get 0.
    """
    batch, tokens, num_heads, _ = q.shape
    if len(todo) == 1 and (block := todo[0][0]).of_q(q).shape == q.shape:
        out, lse = call.kernel.forward(q, block.of_kv(todo[0][1]), block.of_kv(todo[0][2]), block.mask)
        return out.transpose(0, 1).flatten(2).contiguous(), lse
    buffer = q.new_zeros(tokens, batch, num_heads * call.value_dim)
    lse = q.new_full((batch, num_heads, tokens), float("-inf"), dtype=accumulation_dtype(q.dtype))
    for block, k, v in todo:
        write_softmax(block, (q, k, v), heads(buffer, call.value_dim), lse, call)
    return buffer, lse


def write_softmax(block: Block, qkv: Triple, out: Tensor, lse: Tensor, call: Call) -> None:
    """Run one kernel call and write what it finds where its queries are in out [B, N, H, E] and lse [B, H, N]."""
    block_out, block_lse = call.kernel.forward(*block.of_qkv(qkv), block.mask)
    block.of_q(out).copy_(block_out)
    block.of_lse(lse).copy_(block_lse)


def write_gradients(
    block: Block, dout: Tensor, qkv: Triple, saved: tuple[Tensor, Tensor], grads: Triple, call: Call
) -> None:
    """dq, dk and dv of one kernel call, into the tensors that they are of; `saved` are the softmax's out and lse."""
    out, lse = block.of_q(saved[0]), block.of_lse(saved[1]).contiguous()
    call.kernel.backward(block.of_q(dout), block.of_qkv(qkv), out, lse, block.mask, block.of_qkv(grads))


def block_gradients(block: Block, dout: Tensor, qkv: Triple, out: Tensor, lse: Tensor, call: Call) -> Triple:
    """dq, dk and dv of one kernel call, in the dtype of q, from the whole softmax's out and lse."""
    lse = block.of_lse(lse).contiguous()
    return call.kernel.gradients(block.of_q(dout), block.of_qkv(qkv), block.of_q(out), lse, block.mask)
