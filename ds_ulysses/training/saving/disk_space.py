"""Whether the disk has room for what a run is going to write, asked before it trains."""

from __future__ import annotations

import math
import shutil
from typing import Any

from ds_ulysses.comm import once
from ds_ulysses.training.run import Run
from ds_ulysses.training.saving.checkpoints import checkpoints

GIB = 2**30


def check_disk_space(run: Run) -> None:
    """Raise `ValueError` on every rank if the checkpoints and the model cannot fit. Collective."""
    once(lambda: _check(run))


def _check(run: Run) -> None:
    number, each, model = num_checkpoints(run), checkpoint_bytes(run), model_bytes(run)
    place = next(path for path in (run.output_dir.absolute(), *run.output_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if number * each + model > free:
        raise ValueError(
            f"--output_dir {run.output_dir} has {free / GIB:.4g} GiB left, but this run needs at least "
            f"{(number * each + model) / GIB:.4g}: {number} checkpoints of {each / GIB:.4g}, and the model. It would "
            f"end with a full disk. Make room, or write less often or keep fewer: --save_steps, --save_total_limit."
        )


def num_checkpoints(run: Run) -> int:
    """Count how many more checkpoints there will be at once; an old one is removed when a new one is whole."""
    arguments, done = run.arguments, run.progress.step
    if arguments.save_strategy == "no":
        return 0
    if arguments.save_strategy == "steps":
        coming = run.num_steps // arguments.save_steps - done // arguments.save_steps
    else:  # with --max_steps it is not known
        coming = math.floor(arguments.num_train_epochs) if arguments.max_steps < 0 else 1
    if arguments.save_total_limit:
        kept = arguments.save_total_limit + arguments.load_best_model_at_end  # the best one besides
        coming = min(coming, max(1, kept + 1 - len(checkpoints(run.output_dir))))
    return coming


def checkpoint_bytes(run: Run) -> int:
    """Count a checkpoint's least bytes: fp32 weights, Adam's two moments, the model's where ZeRO does not cut them."""
    weights = run.engine.module.parameters()
    trained = sum(_numel(weight) for weight in weights if weight.requires_grad)
    adam = "adam" in type(run.engine.basic_optimizer).__name__.lower()
    return (12 if adam else 4) * trained + (model_bytes(run) if run.engine.zero_optimization_stage() in (1, 2) else 0)


def model_bytes(run: Run) -> int:
    """Count the bytes of the saved model; of an adapter, those of its weights alone."""
    saved = (p for p in run.engine.module.parameters() if p.requires_grad or not run.arguments.use_peft)
    return sum(_numel(weight) * weight.element_size() for weight in saved)


def _numel(weight: Any) -> int:
    """Of the whole, of which ZeRO-3 leaves a rank a piece."""
    return getattr(weight, "ds_numel", weight.numel())
