"""Dao's flash-attn, generations 2, 3 and 4, where they are installed. CUDA, fp16 and bf16.

The three differ in argument order, in how "no limit" and "no softcap" are written, and in the lse of a query
that sees nothing (+inf in generation 2). All write gradients in place, so none is copied. With a table of segments they
take the one row without its batch dim: [1, L, H, D] -> [L, H, D], lse [1, H, L] -> [H, L].
"""

from __future__ import annotations

import importlib
import inspect
from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ds_ulysses.kernels.contract import Kernel, Mask, Request, Softmax, Triple
from ds_ulysses.kernels.segments import Segments


@cache
def _load(module: str) -> ModuleType | None:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Of a function, or of the one that an op of torch.library was made of."""
    return dict(inspect.signature(getattr(function, "_init_fn", function)).parameters)


def _unused(function: Callable[..., Any]) -> dict[str, None]:
    """None for each argument without a default: paging, rotary, descaling and the like, which we never use."""
    return {name: None for name, p in _parameters(function).items() if p.default is inspect.Parameter.empty}


def _named(function: Callable[..., Any], mask: Mask) -> dict[str, Any]:
    """The mask in the names of a generation 3: releases call two of its arguments differently."""
    known = _parameters(function)
    causal = "is_causal" if "is_causal" in known else "causal"
    options: dict[str, Any] = {"softmax_scale": mask.scale, "softcap": mask.softcap, causal: mask.right == 0}
    if "window_size" in known:
        return options | {"window_size": (mask.left, mask.right)}
    return options | {"window_size_left": mask.left, "window_size_right": mask.right}


def _table(segments: Segments | None, device: torch.device) -> dict[str, Any]:
    """The arguments that describe a table."""
    if segments is None:
        return {}
    q, k = segments.cu_seqlens(device)
    return {"cu_seqlens_q": q, "cu_seqlens_k": k, "max_seqlen_q": segments.max_q, "max_seqlen_k": segments.max_k}


def flash_refusal(request: Request, max_head_dim: int = 256) -> str | None:
    """Return why a CUDA flash kernel cannot serve the request: they take half precision and head dims in steps of 8."""
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"it has no {request.dtype}"
    if request.head_dim > max_head_dim or request.head_dim % 8:
        return f"it has no head dim {request.head_dim}"
    return None


class _FlashAttention(Kernel):
    device = "cuda"
    module: str
    max_head_dim = 256
    generations: tuple[int, ...]
    """Major compute capabilities whose backward the generation supports."""

    def _refusal(self, request: Request) -> str | None:
        if refusal := flash_refusal(request, self.max_head_dim):
            return refusal
        if _load(self.module) is None:
            return f"{self.module} is not installed"
        if _capability()[0] not in self.generations:
            return f"it does not train on compute capability {'.'.join(map(str, _capability()))}"
        return None

    @property
    def library(self) -> Any:
        """The installed module of this generation."""
        library = _load(self.module)
        assert library is not None, f"{self.name} was selected without {self.module}"
        return library

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, segments: Segments | None) -> tuple[Tensor, Tensor]:
        if segments is None:
            return self._forward((q, k, v), mask, None)
        out, lse = self._forward((q[0], k[0], v[0]), mask, segments)
        return out[None], lse[None]

    def _write_gradients(
        self, dout: Tensor, qkv: Triple, softmax: Softmax, mask: Mask, grads: Triple, segments: Segments | None
    ) -> None:
        tensors = dict(zip(("q", "k", "v", "dq", "dk", "dv"), (*qkv, *grads), strict=True))
        tensors |= {"dout": dout, "out": softmax[0], "lse": softmax[1]}
        if segments is not None:
            tensors = {name: x[0] for name, x in tensors.items()}
        self._backward(tensors, mask, segments)

    @abstractmethod
    def _forward(self, qkv: Triple, mask: Mask, segments: Segments | None) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _backward(self, tensors: dict[str, Tensor], mask: Mask, segments: Segments | None) -> None: ...


class FlashAttention2(_FlashAttention):
    """The kernel of flash-attn, generation 2."""

    name = "flash_attn_2"
    module = "flash_attn.flash_attn_interface"
    generations = (8, 9, 10, 11, 12)

    def _forward(self, qkv: Triple, mask: Mask, segments: Segments | None) -> tuple[Tensor, Tensor]:
        library = self.library
        forward = library._flash_attn_forward if segments is None else library._flash_attn_varlen_forward
        tensors = dict(zip(("q", "k", "v"), qkv, strict=True))
        table = _table(segments, qkv[0].device)
        out, lse, *_ = forward(**tensors, **table, **self._options(mask), return_softmax=False)
        return out, lse.masked_fill_(lse == float("inf"), float("-inf"))

    def _backward(self, tensors: dict[str, Tensor], mask: Mask, segments: Segments | None) -> None:
        library = self.library
        backward = library._flash_attn_backward if segments is None else library._flash_attn_varlen_backward
        lse = tensors.pop("lse")
        tensors["softmax_lse"] = torch.where(lse == float("-inf"), float("inf"), lse)
        table = _table(segments, lse.device)
        backward(**tensors, **table, **self._options(mask), deterministic=False)

    @staticmethod
    def _options(mask: Mask) -> dict[str, Any]:
        return {
            "dropout_p": 0.0,
            "softmax_scale": mask.scale,
            "causal": mask.right == 0,
            "window_size_left": mask.left,
            "window_size_right": mask.right,
            "softcap": mask.softcap,
            "alibi_slopes": None,
        }


class FlashAttention3(_FlashAttention):
    """The kernel of flash-attn, generation 3."""

    name = "flash_attn_3"
    module = "flash_attn_interface"
    generations = (9,)

    def _forward(self, qkv: Triple, mask: Mask, segments: Segments | None) -> tuple[Tensor, Tensor]:
        forward = self.library._flash_attn_forward
        tensors = dict(zip(("q", "k", "v"), qkv, strict=True))
        table = _table(segments, qkv[0].device)
        out, lse, *_ = forward(**_unused(forward) | _named(forward, mask) | tensors | table)
        return out, lse

    def _backward(self, tensors: dict[str, Tensor], mask: Mask, segments: Segments | None) -> None:
        backward = self.library._flash_attn_backward
        tensors["softmax_lse"] = tensors.pop("lse")
        table = _table(segments, tensors["q"].device)
        backward(**_unused(backward) | _named(backward, mask) | tensors | table)


class FlashAttention4(_FlashAttention):
    """The kernel of flash-attn, generation 4."""

    name = "flash_attn_4"
    module = "flash_attn.cute.interface"
    max_head_dim = 128
    generations = (9, 10, 11)

    def _refusal(self, request: Request) -> str | None:
        if refusal := super()._refusal(request):
            return refusal
        needed = {"cu_seqlens_q", "cu_seqlens_k", "window_size_left", "window_size_right"}
        functions = {self.library._flash_attn_fwd: needed, self.library._flash_attn_bwd: needed | {"dq", "dk", "dv"}}
        missing = sorted(name for f, names in functions.items() for name in names - _parameters(f).keys())
        return f"this release of it has no {', '.join(missing)}" if missing else None

    def _forward(self, qkv: Triple, mask: Mask, segments: Segments | None) -> tuple[Tensor, Tensor]:
        forward = self.library._flash_attn_fwd
        table = self._known(forward, segments, qkv[0].device)
        out, lse, *_ = forward(*qkv, return_lse=True, **self._options(mask), **table)
        return out, lse

    def _backward(self, tensors: dict[str, Tensor], mask: Mask, segments: Segments | None) -> None:
        backward = self.library._flash_attn_bwd
        table = self._known(backward, segments, tensors["q"].device)
        backward(**tensors, **self._options(mask), **table)

    @staticmethod
    def _known(function: Callable[..., Any], segments: Segments | None, device: torch.device) -> dict[str, Any]:
        """The table, without the longest segment where a release works it out by itself."""
        known = _parameters(function)
        return {name: x for name, x in _table(segments, device).items() if name in known or "max" not in name}

    @staticmethod
    def _options(mask: Mask) -> dict[str, Any]:
        causal = mask.causal
        return {
            "softmax_scale": mask.scale,
            "causal": causal,
            "window_size_left": None if causal or mask.left < 0 else mask.left,
            "window_size_right": None if causal or mask.right < 0 else mask.right,
            "softcap": mask.softcap,
        }
