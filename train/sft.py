"""Supervised fine-tuning of a Hugging Face model on sequences that are split over ranks.

    deepspeed train/sft.py --config train/recipes/smollm2_python_docs.yaml
    deepspeed train/sft.py --model_name_or_path M --dataset D --deepspeed ds_configs/zero3.json --output_dir OUT

Everything that can be refused is refused before the data is read; everything is said before it is done.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ds_ulysses
from ds_ulysses.checkpoint import save_pretrained
from ds_ulysses.deepspeed_json import compute_dtype, load_deepspeed_json, resolve_batch_sizes
from ds_ulysses.engine import SequenceParallelEngine, choose_kernel
from ds_ulysses.support import head_counts, refuse_unsupported_model
from ds_ulysses.topology import Topology, init_distributed
from train.ahead import ReadyStep, ready_steps
from train.arguments import SftArguments, parse_arguments
from train.cost import cost_of
from train.data import Samples, Stream
from train.deepspeed_auto import fill_from_arguments, fill_from_data, fill_from_model
from train.files import finished_folder
from train.log import TrainingLog
from train.model import build_engine, load_model_config, load_tokenizer
from train.reading import read_data
from train.report import start_report
from train.steps import Batching, count_steps, plan_steps
from train.survey import Survey


def main() -> None:
    # DeepSpeed calls collectives by names that torch is about to retire; nobody here can do anything about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    try:
        run = prepare()
    except ValueError as error:  # a refusal, which needs no traceback; from here on there is none
        sys.exit(f"rank {os.environ.get('RANK', '0')}: {error}")
    if run is None:
        return
    train(run)
    save(run.engine, run.tokenizer, Path(run.arguments.output_dir))
    say(run.engine.topology.rank, f"saved in {run.arguments.output_dir}")
    dist.destroy_process_group()


@dataclass
class Run:
    """All that training needs."""

    arguments: SftArguments
    engine: SequenceParallelEngine
    tokenizer: Any
    samples: Samples | Stream
    batching: Batching
    num_steps: int


def prepare() -> Run | None:
    """Check, read, report and build; None after a dry run."""
    arguments = parse_arguments()
    check_output(arguments)
    share_cores()
    init_distributed()
    config = load_deepspeed_json(arguments.deepspeed)
    config = fill_from_arguments(config, arguments, dist.get_world_size())
    settings = ds_ulysses.SequenceParallelConfig.from_deepspeed(config)
    model_config = load_model_config(arguments.model_name_or_path)
    refuse_unsupported_model(model_config)
    topology = Topology.create(settings, head_counts(model_config))
    batching = choose_batching(arguments, config, model_config, topology)
    choose_kernel(model_config, compute_dtype(config), topology)
    fill_from_model(config, model_config.hidden_size)

    tokenizer = load_tokenizer(arguments.model_name_or_path)
    samples = read_data(arguments, tokenizer)
    num_steps = arguments.max_steps
    if isinstance(samples, Samples) and num_steps < 0:
        num_steps = count_steps(samples.documents, len(samples), batching, arguments.num_train_epochs)
    fill_from_data(config, num_steps)
    say(topology.rank, start_report(topology, config, model_config, samples, batching))
    if arguments.dry_run:
        return None
    engine = build_engine(arguments, config, num_steps)
    return Run(arguments, engine, tokenizer, samples, batching, num_steps)


def check_output(arguments: SftArguments) -> None:
    """Refuse to mix with files of another run."""
    folder = Path(arguments.output_dir)
    if folder.exists() and not arguments.overwrite_output_dir and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--output_dir {folder} is not empty. Choose another, or give --overwrite_output_dir.")


def share_cores() -> None:
    """On a CPU, ranks would otherwise each start a thread per core and wait for one another."""
    if "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available():
        ranks_here = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))


def choose_batching(arguments: SftArguments, config: dict[str, Any], model_config: Any, topology: Topology) -> Batching:
    """How samples are put together."""
    return Batching(
        sizes=resolve_batch_sizes(config, topology.dp_size),
        dp_size=topology.dp_size,
        cost=cost_of(model_config),
        max_length=arguments.max_length,
        packing=arguments.packing,
        padding_free=arguments.padding_free,
        seed=arguments.seed,
    )


def train(run: Run) -> None:
    """The loop over optimizer steps."""
    topology, samples, batching = run.engine.topology, run.samples, run.batching
    num_samples = len(samples) if isinstance(samples, Samples) else None
    plans = islice(plan_steps(samples.documents, num_samples, batching), run.num_steps)
    with TrainingLog(Path(run.arguments.output_dir), run.num_steps, writes=topology.rank == 0) as log:
        for number, step in enumerate(ready_steps(plans, samples, batching, topology.dp_rank), start=1):
            learning_rate = run.engine.get_lr()[0]
            loss = train_step(run.engine, step)
            log.step(
                Survey(batching, topology.sp_size).add(step.plan),
                step=number,
                epoch=step.plan.epoch,
                loss=loss,
                learning_rate=learning_rate,
                grad_norm=run.engine.get_global_grad_norm(),
            )


def train_step(engine: SequenceParallelEngine, step: ReadyStep) -> float:
    """One optimizer step; returns the mean loss over the targets of all its samples."""
    num_targets = step.plan.num_targets()
    step_loss = 0.0
    for batch, targets in zip(step.batches, num_targets, strict=True):
        loss = engine(**ds_ulysses.shard_batch(batch, engine.topology)).loss
        engine.backward(loss)
        engine.step()
        step_loss += targets / sum(num_targets) * loss.detach()
    return float(step_loss)


def save(engine: SequenceParallelEngine, tokenizer: Any, output_dir: Path) -> None:
    """Model or adapter, and tokenizer, whole or not at all."""
    if engine.topology.rank > 0:
        return save_pretrained(engine, output_dir)
    with finished_folder(output_dir) as folder:
        save_pretrained(engine, folder)
        tokenizer.save_pretrained(folder)


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
