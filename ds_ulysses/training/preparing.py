"""What a run settles before there is an engine: where it writes, how it uses the cores, how it batches."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from ds_ulysses.config import BatchSizes, resolve_batch_sizes
from ds_ulysses.data import Batching, Samples, Stream, cost_of, count_steps
from ds_ulysses.engine import Start
from ds_ulysses.training.arguments import SftArguments
from ds_ulysses.training.saving.checkpoints import checkpoints
from ds_ulysses.training.watching.faults import NotFinite


@contextmanager
def ending_in_one_line() -> Iterator[None]:
    """End the process with the text of a refusal, or of a fault that is named: neither needs a traceback."""
    # DeepSpeed calls collectives by names that torch is about to retire; nobody here can do anything about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    try:
        yield
    except (ValueError, NotFinite) as error:
        sys.exit(f"rank {os.environ.get('RANK', '0')}: {error}")


def say(rank: int, text: str) -> None:
    """Print on the first rank."""
    if rank == 0:
        print(text, flush=True)


def check_output(arguments: SftArguments) -> None:
    """Refuse to mix with files of another run."""
    folder = Path(arguments.output_dir)
    if arguments.resume_from_checkpoint or not folder.exists():
        return
    if found := checkpoints(folder):
        raise ValueError(
            f"--output_dir {folder} holds {found[-1].name} of another run. Go on with --resume_from_checkpoint latest, "
            f"choose another folder, or move it away."
        )
    if not arguments.overwrite_output_dir and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"--output_dir {folder} is not empty. Choose another, go on with --resume_from_checkpoint latest, or give "
            f"--overwrite_output_dir."
        )


def share_cores() -> None:
    """Share out a CPU's cores: ranks would otherwise each start a thread per core and wait for one another."""
    if "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available():
        ranks_here = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))


def choose_batching(arguments: SftArguments, start: Start) -> Batching:
    """Choose how samples are put together. Raises `ValueError` for batch sizes that contradict each other."""
    return Batching(
        sizes=resolve_batch_sizes(start.config, start.topology.dp_size),
        dp_size=start.topology.dp_size,
        cost=cost_of(start.model_config),
        max_length=arguments.max_length,
        packing=arguments.packing,
        padding_free=arguments.padding_free,
        seed=arguments.seed,
    )


def choose_eval_batching(arguments: SftArguments, batching: Batching) -> Batching:
    """Choose the batching of evaluation: the same, without accumulation."""
    micro = arguments.per_device_eval_batch_size or batching.sizes.micro
    return replace(batching, sizes=BatchSizes(micro * batching.dp_size, micro, 1))


def num_steps_of(arguments: SftArguments, samples: Samples | Stream, batching: Batching) -> int:
    """Count the optimizer steps of the run: as many as are asked for, or as the epochs make."""
    if arguments.max_steps > 0:
        return arguments.max_steps
    assert isinstance(samples, Samples), "a stream comes with --max_steps"
    return count_steps(samples.documents, len(samples), batching, arguments.num_train_epochs)
