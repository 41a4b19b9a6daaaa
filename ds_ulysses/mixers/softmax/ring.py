"""Attention over the ring: queries stay, keys and values come by, one block per step, and a block's gradient goes home.

Liu et al., "Ring Attention" (arXiv:2310.01889), with three changes. A block goes straight to each rank that needs it,
not from neighbour to neighbour, so that it carries only what that rank sees: see plan.py. The backward begins with the
block that came last, which is still here. And where several ranks of a Ulysses group need the same KV head, keys cross
the ring once, as sequence shards, and are spread over the group on arrival.

Shapes: B batch, n tokens of a ring rank, S = n / U of this rank, H and K local query and KV heads, D dim of queries and
keys, E of values.

    q            [n, B, H * D]
    out          [n, B, H * E]
    kv           [n, B, K * (D + E)], keys and values side by side; spread keys: [S, B, (all KV heads) * (D + E)]
    lse          [B, H, n]
    block        [M, B, K * (D + E)] of the M tokens that are needed; B = 1 if rows hold documents of their own
    parked       flat: the last block that came over the ring, kept for the backward

The next block travels while this one is computed, and a gradient while the next one is: two blocks of each are in
memory, whatever the number of ranks. Sums are kept in the accumulation dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ds_ulysses.config import accumulation_dtype
from ds_ulysses.kernels import merge
from ds_ulysses.mixers.softmax.blocks import block_gradients, blocks, heads, keys_and_values
from ds_ulysses.mixers.softmax.call import Call, decode
from ds_ulysses.mixers.softmax.sinks import apply_sinks, sink_gradients
from ds_ulysses.mixers.softmax.transport import Ring
from ds_ulysses.placement import Step, make_plan


def ring_attention(q: Tensor, kv: Tensor, documents: Tensor | None, sinks: Tensor | None, call: Call) -> Tensor:
    """Attend to the keys of all ring ranks. Differentiable.

    q [n, B, H * D], kv [n, B, K * (D + E)] (or as shards, see above); `documents` and `sinks` as in `local_attention`.
    Returns [n, B, H * E].
    """
    out, _, _ = torch.ops.ds_ulysses.ring_attention(q, kv, documents, sinks, call.encode())
    return out


def _plan(q: Tensor, documents: Tensor | None, call: Call) -> tuple[Step, ...]:
    return make_plan(call.geometry(q, documents), call.place.ring_rank)


@torch.library.custom_op("ds_ulysses::ring_attention", mutates_args=())
def _ring_attention(
    q: Tensor, kv: Tensor, documents: Tensor | None, sinks: Tensor | None, settings: str
) -> tuple[Tensor, Tensor, Tensor]:
    call, packed = decode(settings), documents is not None
    plan, kv = _plan(q, documents, call), kv.contiguous()
    lse, parked = _kept(q, kv, call)
    lse.fill_(float("-inf"))
    sums = q.new_zeros(_out_shape(q, call), dtype=lse.dtype)
    out, q = heads(sums, call.value_dim), heads(q, call.head_dim)
    arriving = Ring(plan, kv, parked, packed, call).blocks_forward()
    for step in plan:
        k, v = keys_and_values(next(arriving), call.dims)
        for block in blocks(step.pairs, call.runs, call, packed, joined=True):
            block_out, block_lse = call.kernel.forward(*block.of_qkv((q, k, v)), block.mask)
            merge(block.of_q(out), block.of_lse(lse), block_out, block_lse)
        del k, v  # before the next but one is given memory
    apply_sinks(out, lse, sinks)
    return sums.to(q.dtype), lse, parked


@_ring_attention.register_fake
def _(q: Tensor, kv: Tensor, documents: object, sinks: object, settings: str) -> tuple[Tensor, Tensor, Tensor]:
    call = decode(settings)
    return q.new_empty(_out_shape(q, call)), *_kept(q, kv, call)


def _out_shape(q: Tensor, call: Call) -> tuple[int, int, int]:
    return q.shape[0], q.shape[1], call.local_heads[0] * call.value_dim


def _kept(q: Tensor, kv: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Uninitialised lse and parked block."""
    lse = q.new_empty(q.shape[1], call.local_heads[0], q.shape[0], dtype=accumulation_dtype(q.dtype))
    return lse, kv.new_empty(kv.numel())


@torch.library.custom_op("ds_ulysses::ring_attention_backward", mutates_args=())
def _ring_attention_backward(
    dout: Tensor, saved: list[Tensor], documents: Tensor | None, sinks: Tensor | None, settings: str
) -> tuple[Tensor, Tensor, Tensor]:
    q, kv, out, lse, parked = saved
    call, packed = decode(settings), documents is not None
    ring = Ring(_plan(q, documents, call), kv.contiguous(), parked, packed, call)
    q, out, dout = heads(q, call.head_dim), heads(out, call.value_dim), heads(dout, call.value_dim)
    dq_sums = torch.zeros_like(saved[0], dtype=lse.dtype, memory_format=torch.contiguous_format)
    dkv_sums = torch.zeros_like(ring.kv, dtype=lse.dtype)

    def computed() -> Iterator[Tensor]:
        """The gradient of each block, in the order in which blocks come."""
        dq = heads(dq_sums, call.head_dim)
        arriving = ring.blocks_backward()
        for step in ring.reverse:
            buffer = next(arriving)
            dbuffer = torch.zeros_like(buffer, dtype=lse.dtype)
            (k, v), (dk, dv) = (keys_and_values(x, call.dims) for x in (buffer, dbuffer))
            for block in blocks(step.pairs, call.runs, call, packed, joined=True):
                grads = block_gradients(block, dout, (q, k, v), out, lse, call)
                block.of_q(dq).add_(grads[0])
                block.of_kv(dk).add_(grads[1])
                block.of_kv(dv).add_(grads[2])
            del buffer, k, v, dk, dv
            yield dbuffer
            del dbuffer

    ring.bring_home(computed(), dkv_sums)
    return dq_sums.to(q.dtype), dkv_sums.to(kv.dtype), sink_gradients(dout, out, lse, sinks)


@_ring_attention_backward.register_fake
def _(
    dout: Tensor, saved: list[Tensor], documents: object, sinks: Tensor | None, settings: str
) -> tuple[Tensor, Tensor, Tensor]:
    dsinks = saved[3].new_empty(0 if sinks is None else sinks.shape)
    return saved[0].new_empty(saved[0].shape), saved[1].new_empty(saved[1].shape), dsinks


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)  # of lse and what else is kept: there are none
    q, kv, documents, sinks, ctx.settings = inputs
    ctx.save_for_backward(q, kv, documents, sinks, *output)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, dout: Tensor, *_: object):  # type: ignore[no-untyped-def]
    q, kv, documents, sinks, *output = ctx.saved_tensors
    dq, dkv, dsinks = torch.ops.ds_ulysses.ring_attention_backward(
        dout, [q, kv, *output], documents, sinks, ctx.settings
    )
    return dq, dkv, None, None if sinks is None else dsinks, None


_ring_attention.register_autograd(_backward, setup_context=_keep)
