"""Checkpoints of a run: folders `checkpoint-STEP` in its output folder, each there whole or not at all.

state/            weights, optimizer, schedule: DeepSpeed's files
random_RANK.pt    random numbers of each rank
progress.json     where the run stood, and what it must agree with to go on
manifest.json     every file and its size, written last
config.json ...   model config, tokenizer and adapter config, for export
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ds_ulysses.comm import barrier, once
from ds_ulysses.engine import (
    fault_of,
    flush,
    forget_universal,
    load_state,
    make_universal,
    save_state,
    write_configs,
    write_manifest,
)
from ds_ulysses.training.run import Progress, Run

PROGRESS = "progress.json"


def save_checkpoint(run: Run) -> None:
    """Write the state after the last optimizer step, through a temporary name. Collective.

    Only when it is whole, older ones beyond `save_total_limit` are removed, but never that of the best evaluation, if
    it is going to be needed.
    """
    target = _folder_of(run, run.progress.step)
    scratch = target.with_name(f".{target.name}.tmp")
    try:
        _write(run, scratch)
    except (OSError, RuntimeError) as error:  # what torch raises for a full disk
        raise ValueError(
            f"The checkpoint {target} could not be written: {error}. Those before it are as they were; make room, and "
            f"go on with --resume_from_checkpoint latest."
        ) from error
    if run.rank == 0:
        shutil.rmtree(target, ignore_errors=True)
        os.replace(scratch, target)
        if limit := run.arguments.save_total_limit:
            others = [path for path in checkpoints(run.output_dir) if path not in (target, best_checkpoint(run))]
            for old in others[: max(0, len(others) - limit + 1)]:
                shutil.rmtree(old)
    barrier()


def _write(run: Run, folder: Path) -> None:
    if run.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    barrier()
    save_state(run.engine, folder)
    torch.save(_random_state(), folder / f"random_{run.rank}.pt")
    barrier()
    if run.rank == 0:
        write_configs(run.engine, folder)
        run.tokenizer.save_pretrained(folder)
        (folder / PROGRESS).write_text(json.dumps({"progress": asdict(run.progress), "facts": run.facts}, indent=1))
        write_manifest(folder)
        flush(folder)


def best_checkpoint(run: Run) -> Path | None:
    """Return the checkpoint of the best evaluation so far, if its model is the one to save at the end."""
    best = run.progress.best_step
    return _folder_of(run, best) if run.arguments.load_best_model_at_end and best else None


def refuse_lost_best(run: Run) -> None:
    """Raise `ValueError` if the model of the best evaluation so far could not be saved at the end."""
    best = best_checkpoint(run)
    if best is not None and (fault := fault_of(best)):
        raise ValueError(
            f"The best evaluation is that of {best}, whose model cannot be saved at the end: {fault}. Put it there, or "
            f"go on without --load_best_model_at_end."
        )


def _folder_of(run: Run, step: int) -> Path:
    return run.output_dir / f"checkpoint-{step}"


def checkpoints(output_dir: Path) -> list[Path]:
    """List the checkpoints of a run, oldest first."""
    found = [path for path in output_dir.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def find_checkpoint(asked: str | None, output_dir: Path) -> Path | None:
    """Return the folder that `--resume_from_checkpoint` means; None for a new run, also if there is no latest yet.

    Raises `ValueError` that names the fault and the checkpoints before it, if it is not whole.
    """
    if asked is None:
        return None
    if asked != "latest":
        folder = Path(asked)
    elif found := checkpoints(output_dir):
        folder = found[-1]
    else:
        return None
    if fault := fault_of(folder):
        whole = [str(path) for path in checkpoints(folder.parent) if path != folder and not fault_of(path)]
        others = f"Whole ones are: {', '.join(whole)}." if whole else "There is no other one."
        raise ValueError(f"The checkpoint {folder} cannot be resumed from: {fault}. {others}")
    return folder


def read_progress(folder: Path, data: dict[str, Any]) -> tuple[Progress, dict[str, Any]]:
    """Read where the run stood, and its facts. Raises `ValueError` if it would not see the samples that are left."""
    saved = json.loads((folder / PROGRESS).read_text())
    facts = saved["facts"]
    if differing := [f"{key} {facts[key]!r}, now {value!r}" for key, value in data.items() if facts[key] != value]:
        raise ValueError(
            f"The checkpoint {folder} is of a run with {'; '.join(differing)}: samples would be left out or repeated. "
            f"Resume with the same, or start a new run from an export of it."
        )
    return Progress(**saved["progress"]), facts


def prepare_state(folder: Path, saved: dict[str, Any], ranks: dict[str, Any], config: dict[str, Any]) -> None:
    """Have the state cut anew where ranks or ZeRO stage are others than those of the checkpoint. Collective.

    Raises `ValueError` for changes that DeepSpeed cannot make.
    """
    if all(saved[key] == value for key, value in ranks.items()):
        return
    if 0 in (saved["ZeRO stage"], ranks["ZeRO stage"]):
        if saved["ZeRO stage"] == ranks["ZeRO stage"]:
            return  # nothing is cut
        raise ValueError(
            f"The checkpoint {folder} is of ZeRO stage {saved['ZeRO stage']}, this run of {ranks['ZeRO stage']}: "
            f"DeepSpeed converts between 1, 2 and 3 only. Use the same stage."
        )
    config.setdefault("checkpoint", {})["load_universal"] = True
    once(lambda: make_universal(folder))


def restore(run: Run, folder: Path) -> None:
    """Read the state into a new engine, and go on with the random numbers. Collective.

    Raises `ValueError` as `refuse_lost_best` does.
    """
    refuse_lost_best(run)
    load_state(run.engine, folder)
    if (random_file := folder / f"random_{run.rank}.pt").exists():
        state = torch.load(random_file, weights_only=True)
        torch.set_rng_state(state["cpu"])
        if "device" in state:
            torch.cuda.set_rng_state(state["device"])
    barrier()
    if run.rank == 0:
        forget_universal(folder)


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["device"] = torch.cuda.get_rng_state()
    return state
