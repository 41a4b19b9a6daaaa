"""The model that a run ends with."""

from __future__ import annotations

from pathlib import Path

from ds_ulysses.comm import once
from ds_ulysses.engine import finished_folder, save_pretrained, write_model
from ds_ulysses.training.run import Run
from ds_ulysses.training.saving.checkpoints import best_checkpoint, refuse_lost_best


def save_model(run: Run) -> None:
    """Save model or adapter, and tokenizer, whole or not at all. Collective."""
    best = best_checkpoint(run)
    if best is not None and run.progress.best_step < run.progress.step:
        once(lambda: _save_best(run, best))
    else:
        _save_last(run)


def _save_best(run: Run, best: Path) -> None:
    """Of an earlier checkpoint, in the dtype of training. One rank calls it."""
    refuse_lost_best(run)
    with finished_folder(run.output_dir) as folder:
        write_model(best, folder, next(p.dtype for p in run.engine.module.parameters() if p.requires_grad))
    print(
        f"the best evaluation was after step {run.progress.best_step}; its model is the one that is saved", flush=True
    )


def _save_last(run: Run) -> None:
    """As it is now. Collective."""
    if run.rank > 0:
        return save_pretrained(run.engine, run.output_dir)
    with finished_folder(run.output_dir) as folder:
        save_pretrained(run.engine, folder)
        run.tokenizer.save_pretrained(folder)
