"""What the device of this rank can do, and has used."""

from __future__ import annotations

import resource

import torch

PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12}
"""Per second in bf16 without sparsity, of the data sheets, by a part of the device's name."""


def peak_flops() -> float | None:
    """Return the peak of this rank's GPU, in operations per second, if it is a known one."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def peak_memory() -> int:
    """Return the most bytes that this rank held so far: of the GPU's memory, or of the process without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
