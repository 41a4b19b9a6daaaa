"""Local attention: one kernel a file, all behind one contract, and the choice among them."""

from ds_ulysses.kernels.contract import Kernel, Mask, Request, Softmax, Triple
from ds_ulysses.kernels.merge import merge
from ds_ulysses.kernels.segments import Segment, Segments
from ds_ulysses.kernels.selection import KERNELS, select_kernel

__all__ = ["KERNELS", "Kernel", "Mask", "Request", "Segment", "Segments", "Softmax", "Triple", "merge", "select_kernel"]
