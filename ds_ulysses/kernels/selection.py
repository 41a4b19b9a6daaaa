"""Which kernel attends: the fastest that can, or the one that the config names."""

from __future__ import annotations

from functools import cache

from ds_ulysses.kernels.contract import Kernel, Request
from ds_ulysses.kernels.cpu_flash import CpuFlashKernel
from ds_ulysses.kernels.eager import EagerKernel
from ds_ulysses.kernels.flash_attn import FlashAttention2, FlashAttention3, FlashAttention4
from ds_ulysses.kernels.torch_varlen import TorchVarlenKernel

# Fastest first; the last one can do everything.
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        FlashAttention4(), FlashAttention3(), FlashAttention2(), TorchVarlenKernel(), CpuFlashKernel(), EagerKernel()
    )
}  # fmt: skip


@cache
def select_kernel(name: str, request: Request) -> tuple[Kernel, str]:
    """Return the kernel and why it was taken. Raises `ValueError` if the named one cannot do it."""
    refusals = {kernel.name: kernel.refusal(request) for kernel in KERNELS.values()}
    able = [kernel for kernel, refusal in refusals.items() if refusal is None]
    if name == "auto":
        here = [k.name for k in KERNELS.values() if k.device in (None, request.device)]
        passed_over = [f"{kernel}: {refusals[kernel]}" for kernel in here[: here.index(able[0])]]
        return KERNELS[able[0]], "; ".join(["the fastest that can", *passed_over])
    if refusals[name] is not None:
        raise ValueError(f'"kernel" is {name!r}, but {refusals[name]}. Able here: {", ".join(able)}, or "auto".')
    return KERNELS[name], "set in the config"
