"""Settings: the DeepSpeed JSON and our block in it, read once and checked once, and constants that all rooms need.

It stands below everything and needs neither torch nor deepspeed.
"""

from ds_ulysses.config.constants import IGNORE_INDEX, OPTIONS
from ds_ulysses.config.deepspeed_json import (
    REFUSALS,
    BatchSizes,
    compute_dtype,
    get_nested,
    load_deepspeed_json,
    resolve_batch_sizes,
    zero_stage,
)
from ds_ulysses.config.dtypes import BYTES, accumulation_dtype, dtype_name, on_the_wire, torch_dtype, wire_dtype
from ds_ulysses.config.entry import Direction, Entry
from ds_ulysses.config.settings import SequenceParallelConfig
from ds_ulysses.config.shipped import or_shipped, shipped

__all__ = [
    "BYTES",
    "IGNORE_INDEX",
    "OPTIONS",
    "REFUSALS",
    "BatchSizes",
    "Direction",
    "Entry",
    "SequenceParallelConfig",
    "accumulation_dtype",
    "compute_dtype",
    "dtype_name",
    "get_nested",
    "load_deepspeed_json",
    "on_the_wire",
    "or_shipped",
    "resolve_batch_sizes",
    "shipped",
    "torch_dtype",
    "wire_dtype",
    "zero_stage",
]
