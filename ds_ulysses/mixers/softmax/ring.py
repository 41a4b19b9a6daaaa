"""Attention over the ring: queries stay, keys and values come by, one block per step, and a block's gradient goes home.

Liu et al., "Ring Attention" (arXiv:2310.01889), with three changes. A block goes straight to each rank that needs it,
not from neighbour to neighbour, so that it carries only what that rank sees: see placement/schedule.py. The backward
begins with the block that came last, which is still here. And where several ranks of a Ulysses group need the same KV
head, keys cross the ring once, as sequence shards, and are spread over the group on arrival.

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

from ds_ulysses.comm import Ring
from ds_ulysses.config import accumulation_dtype
from ds_ulysses.kernels import merge
from ds_ulysses.mixers.softmax.buffers import heads, keys_and_values
from ds_ulysses.mixers.softmax.call import Call, call_of, decode, local_heads
from ds_ulysses.mixers.softmax.sinks import apply_sinks, sink_gradients
from ds_ulysses.placement import Placement


def ring_attention(q: Tensor, kv: Tensor, placement: Placement, sinks: Tensor | None, settings: str) -> Tensor:
    """Attend to the keys of all ring ranks. Differentiable.

    q [n, B, H * D], kv [n, B, K * (D + E)] (or as shards, see above); `sinks` [H] or None. Returns [n, B, H * E].
    """
    out, _, _ = torch.ops.ds_ulysses.ring_attention(q, kv, placement, sinks, settings)
    return out


def _ring(kv: Tensor, parked: Tensor, call: Call) -> Ring:
    spread = call.exchange.kv if call.spreads_keys else None
    return Ring([step for step, _ in call.steps], kv, parked, call.placement, spread)


@torch.library.custom_op("ds_ulysses::ring_attention", mutates_args=())
def _ring_attention(
    q: Tensor, kv: Tensor, placement: Placement, sinks: Tensor | None, settings: str
) -> tuple[Tensor, Tensor, Tensor]:
    placement.refuse_others(q.shape[1], q.shape[0] * placement.ring_size)
    call, kv = call_of(placement, settings), kv.contiguous()
    num_heads, _ = call.local_heads
    lse, parked = _kept(q, kv, num_heads)
    lse.fill_(float("-inf"))
    sums = q.new_zeros((*q.shape[:2], num_heads * call.settings.value_dim), dtype=lse.dtype)
    out, q = heads(sums, call.settings.value_dim), heads(q, call.settings.head_dim)
    arriving = _ring(kv, parked, call).blocks_forward()
    for _, kernel_calls in call.steps:
        k, v = keys_and_values(next(arriving), call.dims)
        for kernel_call in kernel_calls:
            block_softmax = kernel_call.forward(call.kernel, (q, k, v))
            merge(kernel_call.of_q(out), kernel_call.of_lse(lse), *block_softmax)
        del k, v  # before the next but one is given memory
    apply_sinks(out, lse, sinks)
    return sums.to(q.dtype), lse, parked


@_ring_attention.register_fake
def _(q: Tensor, kv: Tensor, placement: Placement, sinks: object, settings: str) -> tuple[Tensor, Tensor, Tensor]:
    num_heads, _ = local_heads(placement, decode(settings))
    out = q.new_empty(*q.shape[:2], num_heads * decode(settings).value_dim)
    return out, *_kept(q, kv, num_heads)


def _kept(q: Tensor, kv: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Uninitialised lse and parked block."""
    lse = q.new_empty(q.shape[1], num_heads, q.shape[0], dtype=accumulation_dtype(q.dtype))
    return lse, kv.new_empty(kv.numel())


@torch.library.custom_op("ds_ulysses::ring_attention_backward", mutates_args=())
def _ring_attention_backward(
    dout: Tensor, saved: list[Tensor], placement: Placement, sinks: Tensor | None, settings: str
) -> tuple[Tensor, Tensor, Tensor]:
    (q, kv, out, lse, parked), call = saved, call_of(placement, settings)
    kv = kv.contiguous()
    ring = _ring(kv, parked, call)
    q, dout, out = heads(q, call.settings.head_dim), *(heads(x, call.settings.value_dim) for x in (dout, out))
    dq_sums = q.new_zeros(saved[0].shape, dtype=lse.dtype)
    dkv_sums = torch.zeros_like(kv, dtype=lse.dtype)

    def computed() -> Iterator[Tensor]:
        """The gradient of each block, in the order in which blocks come."""
        dq = heads(dq_sums, call.settings.head_dim)
        arriving = ring.blocks_backward()
        for _, kernel_calls in reversed(call.steps):
            buffer = next(arriving)
            dbuffer = torch.zeros_like(buffer, dtype=lse.dtype)
            (k, v), (dk, dv) = (keys_and_values(x, call.dims) for x in (buffer, dbuffer))
            for kernel_call in kernel_calls:
                grads = kernel_call.gradients(call.kernel, dout, (q, k, v), (out, lse))
                kernel_call.of_q(dq).add_(grads[0])
                kernel_call.of_kv(dk).add_(grads[1])
                kernel_call.of_kv(dv).add_(grads[2])
            del buffer, k, v, dk, dv
            yield dbuffer
            del dbuffer

    ring.bring_home(computed(), dkv_sums)
    return dq_sums.to(q.dtype), dkv_sums.to(kv.dtype), sink_gradients(dout, out, lse, sinks)


@_ring_attention_backward.register_fake
def _(
    dout: Tensor, saved: list[Tensor], placement: object, sinks: Tensor | None, settings: str
) -> tuple[Tensor, Tensor, Tensor]:
    dsinks = saved[3].new_empty(0 if sinks is None else sinks.shape)
    return saved[0].new_empty(saved[0].shape), saved[1].new_empty(saved[1].shape), dsinks


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)  # of lse and what else is kept: there are none
    q, kv, ctx.placement, sinks, ctx.settings = inputs
    ctx.save_for_backward(q, kv, sinks, *output)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, dout: Tensor, *_: object):  # type: ignore[no-untyped-def]
    q, kv, sinks, *output = ctx.saved_tensors
    dq, dkv, dsinks = torch.ops.ds_ulysses.ring_attention_backward(
        dout, [q, kv, *output], ctx.placement, sinks, ctx.settings
    )
    return dq, dkv, None, None if sinks is None else dsinks, None


_ring_attention.register_autograd(_backward, setup_context=_keep)
