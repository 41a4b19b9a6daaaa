"""What every local attention kernel promises, so that the strategies above need not know which one runs.

Shapes: B batch, Lq and Lk query and key tokens, H query heads, K KV heads (H a multiple of K), D dim of
queries and keys, E of values.

    forward   q [B, Lq, H, D], k [B, Lk, K, D], v [B, Lk, K, E]  ->  out [B, Lq, H, E], lse [B, H, Lq]
    backward  writes dq, dk, dv into tensors of the shapes of q, k, v

- The last dim of every tensor is contiguous; other dims may have any stride.
- Token i of q sees token j of k if  -left <= j - i - (Lk - Lq) <= right;  -1 means no limit. Causal is (-1, 0).
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


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees, and how scores are formed; see the contract above for left and right."""

    scale: float
    left: int = -1
    right: int = 0
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0 means none."""

    @property
    def causal(self) -> bool:
        return self.left < 0 and self.right == 0


@dataclass(frozen=True)
class Request:
    """What a kernel is chosen for."""

    device: str
    dtype: torch.dtype
    head_dim: int
    """The larger one, if values have another than keys."""
    softcap: bool = False


Triple = tuple[Tensor, Tensor, Tensor]
"""q, k and v, or their gradients."""


class Kernel(ABC):
    """One local attention kernel. Zero-length inputs end here: many kernels crash or misbehave on them."""

    name: str
    device: str | None = None
    """The one kind of device it runs on; None: any."""
    any_value_dim = False
    """Whether values may have another dim than keys. For the others, the smaller of both is filled with zeros."""

    def refusal(self, request: Request) -> str | None:
        """Why this kernel cannot serve the request here, or None if it can."""
        if self.device not in (None, request.device):
            return f"it runs on {self.device}, not on {request.device}"
        return self._refusal(request)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """Return out and lse."""
        if not q.numel() or not k.numel():
            lse_shape = (q.shape[0], q.shape[2], q.shape[1])
            lse_dtype = accumulation_dtype(q.dtype)
            return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(lse_shape, float("-inf"), dtype=lse_dtype)
        if self._fits(q, v):
            return self._forward(q, k, v, mask)
        filled = _same_dim(q, k, v)
        out, lse = self._forward(filled[0], filled[1], filled[2], mask)
        return out[..., : v.shape[3]], lse

    def backward(self, dout: Tensor, qkv: Triple, out: Tensor, lse: Tensor, mask: Mask, grads: Triple) -> None:
        """Write the gradients of q, k and v into `grads`."""
        if qkv[0].numel() and qkv[1].numel() and self._fits(qkv[0], qkv[2]):
            self._backward(dout, qkv, out, lse, mask, grads)
        else:
            for grad, value in zip(grads, self.gradients(dout, qkv, out, lse, mask), strict=True):
                grad.copy_(value)

    def gradients(self, dout: Tensor, qkv: Triple, out: Tensor, lse: Tensor, mask: Mask) -> Triple:
        """As `backward`, in tensors of their own: for those who add them up."""
        if not qkv[0].numel() or not qkv[1].numel():
            return tuple(map(torch.zeros_like, qkv))  # type: ignore[return-value]
        if self._fits(qkv[0], qkv[2]):
            return self._gradients(dout, qkv, out, lse, mask)
        dout, out, *filled = _same_dim(dout, out, *qkv)
        dq, dk, dv = self._gradients(dout, (filled[0], filled[1], filled[2]), out, lse, mask)
        return dq[..., : qkv[0].shape[3]], dk[..., : qkv[1].shape[3]], dv[..., : qkv[2].shape[3]]

    def _fits(self, q: Tensor, v: Tensor) -> bool:
        return self.any_value_dim or q.shape[3] == v.shape[3]

    def _gradients(self, dout: Tensor, qkv: Triple, out: Tensor, lse: Tensor, mask: Mask) -> Triple:
        grads = tuple(map(torch.empty_like, qkv))
        self._backward(dout, qkv, out, lse, mask, grads)  # type: ignore[arg-type]
        return grads  # type: ignore[return-value]

    @abstractmethod
    def _refusal(self, request: Request) -> str | None: ...

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _backward(self, dout: Tensor, qkv: Triple, out: Tensor, lse: Tensor, mask: Mask, grads: Triple) -> None: ...


def _same_dim(*tensors: Tensor) -> list[Tensor]:
    """Fill up the last dim with zeros, which change neither scores nor the values in front of them."""
    dim = max(x.shape[3] for x in tensors)
    return [pad(x, (0, dim - x.shape[3])) for x in tensors]


class FunctionalKernel(Kernel):
    """A kernel that returns gradients, and so must copy them where they are to be written."""

    def _backward(self, dout: Tensor, qkv: Triple, out: Tensor, lse: Tensor, mask: Mask, grads: Triple) -> None:
        for grad, value in zip(grads, self._gradients(dout, qkv, out, lse, mask), strict=True):
            grad.copy_(value)

    @abstractmethod
    def _gradients(self, dout: Tensor, qkv: Triple, out: Tensor, lse: Tensor, mask: Mask) -> Triple: ...


def flash_refusal(request: Request, max_head_dim: int = 256) -> str | None:
    """Why a CUDA flash kernel cannot serve the request: they take half precision and head dims in steps of 8."""
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"it has no {request.dtype}"
    if request.head_dim > max_head_dim or request.head_dim % 8:
        return f"it has no head dim {request.head_dim}"
    return None


def empty_rows(num_queries: int, num_keys: int, mask: Mask) -> tuple[int, int]:
    """How many queries at the start and at the end see no key at all."""
    offset = num_keys - num_queries
    before = -(offset + mask.right) if mask.right >= 0 else 0
    after = num_queries + offset - mask.left - num_keys if mask.left >= 0 else 0
    before = min(max(before, 0), num_queries)
    return before, min(max(after, 0), num_queries - before)


def visible(num_queries: int, num_keys: int, mask: Mask, device: torch.device) -> Tensor:
    """[Lq, Lk] boolean: which query sees which key."""
    distance = torch.arange(num_keys, device=device) - torch.arange(num_queries, device=device)[:, None]
    distance = distance - (num_keys - num_queries)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if mask.left >= 0:
        seen &= distance >= -mask.left
    if mask.right >= 0:
        seen &= distance <= mask.right
    return seen
