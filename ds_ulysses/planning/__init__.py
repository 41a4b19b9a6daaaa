"""What a set-up would send, hold and take, from shapes alone: `predict`, and all of `ds-ulysses plan`.

It runs without torch.distributed.
"""

from ds_ulysses.planning.estimate import GIB, Hardware, ModelShape, Setup, longest_row, memory, sent, step_time
from ds_ulysses.planning.predict import AttentionShape, predict
from ds_ulysses.planning.sizing import Wish, plan, shape_of

__all__ = [
    "GIB",
    "AttentionShape",
    "Hardware",
    "ModelShape",
    "Setup",
    "Wish",
    "longest_row",
    "memory",
    "plan",
    "predict",
    "sent",
    "shape_of",
    "step_time",
]
