"""DeepSpeed: the start, the engine, what it does to gradients, checkpoints and their export.

No other room imports deepspeed.
"""

from ds_ulysses.engine.checkpoint import (
    forget_universal,
    load_state,
    make_universal,
    save_pretrained,
    save_state,
    write_configs,
)
from ds_ulysses.engine.comparison import Subject, check
from ds_ulysses.engine.distributed import init_distributed
from ds_ulysses.engine.engine import SequenceParallelEngine
from ds_ulysses.engine.export import export, write_model
from ds_ulysses.engine.files import fault_of, finished_folder, flush, write_manifest
from ds_ulysses.engine.start import Start, initialize, settle

__all__ = [
    "SequenceParallelEngine",
    "Start",
    "Subject",
    "check",
    "export",
    "fault_of",
    "finished_folder",
    "flush",
    "forget_universal",
    "init_distributed",
    "initialize",
    "load_state",
    "make_universal",
    "save_pretrained",
    "save_state",
    "settle",
    "write_configs",
    "write_manifest",
    "write_model",
]
