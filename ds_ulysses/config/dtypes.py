"""Dtypes by their short names, so that arithmetic about them needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Of one number."""
_LONG = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SHORT = {f"torch.{long}": short for short, long in _LONG.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: torch.bfloat16 -> bf16; dtypes without a short name keep their own."""
    return _SHORT.get(str(dtype), str(dtype).removeprefix("torch."))


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a short name: bf16 -> torch.bfloat16."""
    import torch

    dtype: torch.dtype = getattr(torch, _LONG[name])
    return dtype


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that out, lse and gradients are summed in: at least fp32."""
    import torch

    return torch.promote_types(dtype, torch.float32)


def wire_dtype(grad_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Return what gradients summed in `dtype` travel in over a ring, as the config names it; fp32: at least."""
    return dtype if grad_dtype == "fp32" else torch_dtype(grad_dtype)


def accumulated(name: str) -> str:
    """Return the `accumulation_dtype` by name."""
    return "fp64" if name == "fp64" else "fp32"


def on_the_wire(grad_dtype: str, name: str) -> str:
    """Return the `wire_dtype` by name, for keys of dtype `name`."""
    return accumulated(name) if grad_dtype == "fp32" else grad_dtype
