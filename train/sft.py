"""Supervised fine-tuning of a Hugging Face model on sequences that are split over ranks.

    deepspeed train/sft.py --config train/recipes/smollm2_python_docs.yaml
    deepspeed train/sft.py --model_name_or_path M --dataset D --deepspeed ds_configs/zero3.json --output_dir OUT

Everything that can be refused is refused before the data is read; everything is said before it is done.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ds_ulysses
from ds_ulysses.checkpoint import save_pretrained
from ds_ulysses.deepspeed_json import BatchSizes, compute_dtype, load_deepspeed_json, resolve_batch_sizes
from ds_ulysses.engine import choose_kernel
from ds_ulysses.export import write_model
from ds_ulysses.files import finished_folder
from ds_ulysses.support import head_counts, refuse_unsupported_model
from ds_ulysses.topology import Topology, init_distributed
from train.arguments import SftArguments, parse_arguments
from train.checkpoints import (
    best_checkpoint,
    checkpoints,
    find_checkpoint,
    prepare_state,
    read_progress,
    refuse_lost_best,
    restore,
)
from train.cost import cost_of
from train.data import Samples
from train.deepspeed_auto import fill_from_arguments, fill_from_data, fill_from_model
from train.faults import NotFinite
from train.loop import train
from train.model import build_engine, load_model_config, load_tokenizer
from train.reading import read_data, read_eval_data
from train.report import start_report
from train.room import check_room
from train.run import Progress, Run, facts_of_ranks, facts_of_steps
from train.steps import Batching, count_steps
from train.turns import once


def main() -> None:
    # DeepSpeed calls collectives by names that torch is about to retire; nobody here can do anything about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    try:
        run = prepare()
        if run is None:
            return
        check_room(run)
        ended = train(run)
    except (ValueError, NotFinite) as error:  # a refusal, or a fault that is named: neither needs a traceback
        sys.exit(f"rank {os.environ.get('RANK', '0')}: {error}")
    if ended:
        save(run)
        say(run.rank, f"saved in {run.output_dir}")
    else:
        say(run.rank, f"stopped after step {run.progress.step}; go on with --resume_from_checkpoint latest")
    dist.destroy_process_group()


def prepare() -> Run | None:
    """Check, read, report and build; None after a dry run."""
    arguments = parse_arguments()
    checkpoint = find_checkpoint(arguments.resume_from_checkpoint, Path(arguments.output_dir))
    check_output(arguments)
    share_cores()
    init_distributed()
    config = load_deepspeed_json(arguments.deepspeed)
    config = fill_from_arguments(config, arguments, dist.get_world_size())
    settings = ds_ulysses.SequenceParallelConfig.from_deepspeed(config)
    model_config = load_model_config(arguments.model_name_or_path)
    refuse_unsupported_model(model_config)
    topology = Topology.create(settings, head_counts(model_config))
    batching = choose_batching(arguments, resolve_batch_sizes(config, topology.dp_size), model_config, topology)
    choose_kernel(model_config, compute_dtype(config), topology)
    fill_from_model(config, model_config.hidden_size)

    tokenizer = load_tokenizer(arguments.model_name_or_path)
    samples, eval_samples = read_data(arguments, tokenizer), read_eval_data(arguments, tokenizer)
    data, ranks = facts_of_steps(arguments, samples, batching), facts_of_ranks(config, topology.world_size)
    progress, saved = read_progress(checkpoint, data) if checkpoint else (Progress(), {})
    num_steps = arguments.max_steps
    if isinstance(samples, Samples) and num_steps < 0:
        num_steps = count_steps(samples.documents, len(samples), batching, arguments.num_train_epochs)
    fill_from_data(config, num_steps)
    say(topology.rank, start_report(topology, config, model_config, samples, batching, eval_samples))
    if checkpoint:
        say(topology.rank, f"{'resume':>10}  from {checkpoint}, after step {progress.step} of {num_steps}")
    if arguments.dry_run:
        return None
    if checkpoint:
        prepare_state(checkpoint, saved, ranks, config)
    engine = build_engine(arguments, config, num_steps)
    eval_batching = choose_eval_batching(arguments, batching)
    run = Run(
        arguments, engine, tokenizer, samples, batching, num_steps, eval_samples, eval_batching, progress, data | ranks
    )
    if checkpoint:
        restore(run, checkpoint)
    return run


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
    """On a CPU, ranks would otherwise each start a thread per core and wait for one another."""
    if "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available():
        ranks_here = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))


def choose_batching(arguments: SftArguments, sizes: BatchSizes, model_config: Any, topology: Topology) -> Batching:
    """How samples are put together."""
    return Batching(
        sizes=sizes,
        dp_size=topology.dp_size,
        cost=cost_of(model_config),
        max_length=arguments.max_length,
        packing=arguments.packing,
        padding_free=arguments.padding_free,
        seed=arguments.seed,
    )


def choose_eval_batching(arguments: SftArguments, batching: Batching) -> Batching:
    """The same for evaluation, without accumulation."""
    micro = arguments.per_device_eval_batch_size or batching.sizes.micro
    return replace(batching, sizes=BatchSizes(micro * batching.dp_size, micro, 1))


def save(run: Run) -> None:
    """Model or adapter, and tokenizer, whole or not at all. Collective."""
    best = best_checkpoint(run)
    if best is not None and run.progress.best_step < run.progress.step:
        once(lambda: save_best(run, best))
    else:
        save_last(run)


def save_best(run: Run, best: Path) -> None:
    """Of an earlier checkpoint, in the dtype of training. One rank calls it."""
    refuse_lost_best(run)
    with finished_folder(run.output_dir) as folder:
        write_model(best, folder, next(p.dtype for p in run.engine.module.parameters() if p.requires_grad))
    say(run.rank, f"the best evaluation was after step {run.progress.best_step}; its model is the one that is saved")


def save_last(run: Run) -> None:
    """As it is now. Collective."""
    if run.rank > 0:
        return save_pretrained(run.engine, run.output_dir)
    with finished_folder(run.output_dir) as folder:
        save_pretrained(run.engine, folder)
        run.tokenizer.save_pretrained(folder)


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
