"""The trainer that `train/sft.py` tells the story of: arguments, the loop over steps, evaluation.

`saving/` holds checkpoints and the model, `watching/` the log, faults, spikes and the report page.
"""

from ds_ulysses.training.arguments import SftArguments, parse_arguments
from ds_ulysses.training.auto_values import fill_from_arguments, fill_from_data, fill_from_model
from ds_ulysses.training.build import build_engine
from ds_ulysses.training.loop import train
from ds_ulysses.training.overview import overview
from ds_ulysses.training.preparing import (
    check_output,
    choose_batching,
    choose_eval_batching,
    ending_in_one_line,
    num_steps_of,
    say,
    share_cores,
)
from ds_ulysses.training.reading import read_data, read_eval_data
from ds_ulysses.training.run import Progress, Run, facts_of_ranks, facts_of_steps
from ds_ulysses.training.saving.checkpoints import find_checkpoint, prepare_state, read_progress, restore
from ds_ulysses.training.saving.disk_space import check_disk_space
from ds_ulysses.training.saving.model import save_model
from ds_ulysses.training.watching.report import write_report

__all__ = [
    "Progress",
    "Run",
    "SftArguments",
    "build_engine",
    "check_disk_space",
    "check_output",
    "choose_batching",
    "choose_eval_batching",
    "ending_in_one_line",
    "facts_of_ranks",
    "facts_of_steps",
    "fill_from_arguments",
    "fill_from_data",
    "fill_from_model",
    "find_checkpoint",
    "num_steps_of",
    "overview",
    "parse_arguments",
    "prepare_state",
    "read_data",
    "read_eval_data",
    "read_progress",
    "restore",
    "save_model",
    "say",
    "share_cores",
    "train",
    "write_report",
]
