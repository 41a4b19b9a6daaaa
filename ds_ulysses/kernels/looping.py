"""Kernels that know no table of segments: they attend to one segment after the other.

Shapes: as in contract.py; a segment is a slice of the tokens of the one row.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from ds_ulysses.config import accumulation_dtype
from ds_ulysses.kernels.contract import Kernel, Mask, Softmax, Triple
from ds_ulysses.kernels.segments import Segments


class LoopingKernel(Kernel):
    """A kernel for whole rows that returns what it computes, and so must copy it where it is to be written."""

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _gradients(self, dout: Tensor, qkv: Triple, softmax: Softmax, mask: Mask) -> Triple: ...

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, segments: Segments | None) -> tuple[Tensor, Tensor]:
        if segments is None:
            return self._forward(q, k, v, mask)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty((1, q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype))
        if not segments.fills_queries:
            out.zero_()
            lse.fill_(float("-inf"))
        q_sizes, k_sizes = segments.q_sizes, segments.k_sizes
        slices = [x.split(q_sizes, dim=1) for x in (q, out)] + [x.split(k_sizes, dim=1) for x in (k, v)]
        for one_q, one_out, one_k, one_v, one_lse in zip(*slices, lse.split(q_sizes, dim=2), strict=True):
            if one_q.shape[1] and one_k.shape[1]:
                found_out, found_lse = self._forward(one_q, one_k, one_v, mask)
                one_out.copy_(found_out)
                one_lse.copy_(found_lse)
        return out, lse

    def _write_gradients(
        self, dout: Tensor, qkv: Triple, softmax: Softmax, mask: Mask, grads: Triple, segments: Segments | None
    ) -> None:
        (q, k, v), (out, lse), (dq, dk, dv) = qkv, softmax, grads
        if segments is None:
            for grad, value in zip(grads, self._gradients(dout, qkv, softmax, mask), strict=True):
                grad.copy_(value)
            return
        if not (segments.fills_queries and segments.fills_keys):
            for grad in grads:
                grad.zero_()
        queries = [x.split(segments.q_sizes, dim=1) for x in (dout, q, out, dq)]
        keys = [x.split(segments.k_sizes, dim=1) for x in (k, v, dk, dv)]
        lses = lse.split(segments.q_sizes, dim=2)
        for (one_dout, one_q, one_out, one_dq), (one_k, one_v, one_dk, one_dv), one_lse in zip(
            zip(*queries, strict=True), zip(*keys, strict=True), lses, strict=True
        ):
            if one_q.shape[1] and one_k.shape[1]:
                saved = one_out, one_lse.contiguous()
                found = self._gradients(one_dout, (one_q, one_k, one_v), saved, mask)
                for grad, value in zip((one_dq, one_dk, one_dv), found, strict=True):
                    grad.copy_(value)

    def _return_gradients(
        self, dout: Tensor, qkv: Triple, softmax: Softmax, mask: Mask, segments: Segments | None
    ) -> Triple:
        if segments is None:
            return self._gradients(dout, qkv, softmax, mask)
        return super()._return_gradients(dout, qkv, softmax, mask, segments)
