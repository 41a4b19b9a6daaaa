"""What every local attention kernel promises, so that the strategies above need not know which one runs.

Shapes: B batch, Lq and Lk query and key tokens, H query heads, K KV heads (H a multiple of K), D dim of
queries and keys, E of values.

    forward   q [B, Lq, H, D], k [B, Lk, K, D], v [B, Lk, K, E]  ->  out [B, Lq, H, E], lse [B, H, Lq]
    backward  writes dq, dk, dv into tensors of the shapes of q, k, v

- The last dim of every tensor is contiguous; other dims may have any stride.
- Token i of q sees token j of k if  -left <= j - i - (Lk - Lq) <= right;  -1 means no limit. Causal is (-1, 0).
- With a table of segments, B is 1, and each segment is attended to as if it were alone: one call for all of a packed
  row. Queries in no segment see nothing; gradients are written for all tokens, 0 where nobody looks.
- KV heads are never expanded: query head h uses KV head h // (H // K).
- `lse` is the natural logarithm, at least fp32, contiguous. A query that sees nothing has out 0 and lse -inf.
- Lq, Lk or H may be 0.
- `backward` takes the out and lse of the whole softmax, of which k and v may be only a part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_ulysses.config import accumulation_dtype
from ds_ulysses.kernels.segments import Segments


@dataclass(frozen=True)
class Mask:
    """The keys that a query sees, and how scores are formed; see the contract above for left and right."""

    scale: float
    left: int = -1
    right: int = 0
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0 means none."""

    @property
    def causal(self) -> bool:
        """Whether the mask is causal, without a window."""
        return self.left < 0 and self.right == 0


@dataclass(frozen=True)
class Request:
    """The device, dtype, head dim and softcap that a kernel is chosen for."""

    device: str
    dtype: torch.dtype
    head_dim: int
    """The larger one, if values have another than keys."""
    softcap: bool = False


Triple = tuple[Tensor, Tensor, Tensor]
"""q, k and v, or their gradients."""
Softmax = tuple[Tensor, Tensor]
"""out [B, Lq, H, E] and lse [B, H, Lq] of the whole softmax."""


class Kernel(ABC):
    """One local attention kernel. Zero-length inputs end here: many kernels crash or misbehave on them."""

    name: str
    device: str | None = None
    """The one kind of device it runs on; None: any."""
    any_value_dim = False
    """Whether values may have another dim than keys. For the others, the smaller of both is filled with zeros."""

    def refusal(self, request: Request) -> str | None:
        """Return why this kernel cannot serve the request here, or None if it can."""
        if self.device not in (None, request.device):
            return f"it runs on {self.device}, not on {request.device}"
        return self._refusal(request)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, segments: Segments | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse of the queries."""
        if not q.numel() or not k.numel():
            lse_shape = (q.shape[0], q.shape[2], q.shape[1])
            out = q.new_zeros(*q.shape[:3], v.shape[3])
            return out, q.new_full(lse_shape, float("-inf"), dtype=accumulation_dtype(q.dtype))
        if self._fits(q, v):
            return self._attend(q, k, v, mask, segments)
        filled = _same_dim(q, k, v)
        out, lse = self._attend(filled[0], filled[1], filled[2], mask, segments)
        return out[..., : v.shape[3]], lse

    def backward(
        self, dout: Tensor, qkv: Triple, softmax: Softmax, mask: Mask, grads: Triple, segments: Segments | None = None
    ) -> None:
        """Write the gradients of q, k and v into `grads`."""
        if qkv[0].numel() and qkv[1].numel() and self._fits(qkv[0], qkv[2]):
            self._write_gradients(dout, qkv, softmax, mask, grads, segments)
        else:
            for grad, value in zip(grads, self.gradients(dout, qkv, softmax, mask, segments), strict=True):
                grad.copy_(value)

    def gradients(
        self, dout: Tensor, qkv: Triple, softmax: Softmax, mask: Mask, segments: Segments | None = None
    ) -> Triple:
        """Return the gradients as `backward` does, in tensors of their own: for those who add them up."""
        if not qkv[0].numel() or not qkv[1].numel():
            return tuple(map(torch.zeros_like, qkv))  # type: ignore[return-value]
        if self._fits(qkv[0], qkv[2]):
            return self._return_gradients(dout, qkv, softmax, mask, segments)
        out, lse = softmax
        dout, out, *filled = _same_dim(dout, out, *qkv)
        grads = self._return_gradients(dout, (filled[0], filled[1], filled[2]), (out, lse), mask, segments)
        dq, dk, dv = (grad[..., : x.shape[3]] for grad, x in zip(grads, qkv, strict=True))
        return dq, dk, dv

    def _fits(self, q: Tensor, v: Tensor) -> bool:
        return self.any_value_dim or q.shape[3] == v.shape[3]

    @abstractmethod
    def _refusal(self, request: Request) -> str | None: ...

    @abstractmethod
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, segments: Segments | None
    ) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _write_gradients(
        self, dout: Tensor, qkv: Triple, softmax: Softmax, mask: Mask, grads: Triple, segments: Segments | None
    ) -> None: ...

    def _return_gradients(
        self, dout: Tensor, qkv: Triple, softmax: Softmax, mask: Mask, segments: Segments | None
    ) -> Triple:
        grads = tuple(map(torch.empty_like, qkv))
        self._write_gradients(dout, qkv, softmax, mask, grads, segments)  # type: ignore[arg-type]
        return grads  # type: ignore[return-value]


def _same_dim(*tensors: Tensor) -> list[Tensor]:
    """Fill up the last dim with zeros, which change neither scores nor the values in front of them."""
    dim = max(x.shape[3] for x in tensors)
    return [pad(x, (0, dim - x.shape[3])) for x in tensors]
