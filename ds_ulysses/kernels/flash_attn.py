"""Dao's flash-attn, generations 2, 3 and 4, where they are installed. CUDA, fp16 and bf16.

The three differ in argument order, in how "no limit" and "no softcap" are written, and in the lse of a query
that sees nothing (+inf in generation 2). All write gradients in place, so none is copied.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ds_ulysses.kernels.contract import Kernel, Mask, Request, Triple, flash_refusal


@cache
def _load(module: str) -> ModuleType | None:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def _unused(function: Callable[..., Any]) -> dict[str, None]:
    """None for each argument without a default: paging, rotary, descaling and the like, which we never use."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: None for p in parameters if p.default is inspect.Parameter.empty}


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
        library = _load(self.module)
        assert library is not None, f"{self.name} was selected without {self.module}"
        return library


class FlashAttention2(_FlashAttention):
    name = "flash_attn_2"
    module = "flash_attn.flash_attn_interface"
    generations = (8, 9, 10, 11, 12)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        out, lse, _, _ = self.library._flash_attn_forward(
            q, k, v, 0.0, mask.scale, causal=mask.right == 0, window_size_left=mask.left,
            window_size_right=mask.right, softcap=mask.softcap, alibi_slopes=None, return_softmax=False,
        )  # fmt: skip
        return out, lse.masked_fill_(lse == float("inf"), float("-inf"))

    def _backward(self, dout: Tensor, qkv: Triple, out: Tensor, lse: Tensor, mask: Mask, grads: Triple) -> None:
        lse = torch.where(lse == float("-inf"), float("inf"), lse)
        self.library._flash_attn_backward(
            dout, *qkv, out, lse, *grads, 0.0, mask.scale, causal=mask.right == 0, window_size_left=mask.left,
            window_size_right=mask.right, softcap=mask.softcap, alibi_slopes=None, deterministic=False,
        )  # fmt: skip


class FlashAttention3(_FlashAttention):
    name = "flash_attn_3"
    module = "flash_attn_interface"
    generations = (9,)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        forward = self.library._flash_attn_forward
        out, lse, *_ = forward(**_unused(forward) | self._options(mask) | {"q": q, "k": k, "v": v})
        return out, lse

    def _backward(self, dout: Tensor, qkv: Triple, out: Tensor, lse: Tensor, mask: Mask, grads: Triple) -> None:
        backward = self.library._flash_attn_backward
        tensors = dict(zip(("q", "k", "v", "dq", "dk", "dv"), (*qkv, *grads), strict=True))
        tensors |= {"dout": dout, "out": out, "softmax_lse": lse}
        backward(**_unused(backward) | self._options(mask) | tensors)

    @staticmethod
    def _options(mask: Mask) -> dict[str, Any]:
        return {
            "softmax_scale": mask.scale,
            "causal": mask.right == 0,
            "window_size": (mask.left, mask.right),
            "softcap": mask.softcap,
        }


class FlashAttention4(_FlashAttention):
    name = "flash_attn_4"
    module = "flash_attn.cute.interface"
    max_head_dim = 128
    generations = (9, 10, 11)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.library._flash_attn_fwd(q, k, v, return_lse=True, **self._options(mask))
        return out, lse

    def _backward(self, dout: Tensor, qkv: Triple, out: Tensor, lse: Tensor, mask: Mask, grads: Triple) -> None:
        dq, dk, dv = grads
        self.library._flash_attn_bwd(*qkv, out, dout, lse, dq=dq, dk=dk, dv=dv, **self._options(mask))

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
