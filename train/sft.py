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
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_scheduler, set_seed
from transformers.integrations import HfDeepSpeedConfig

import ds_ulysses
from ds_ulysses.checkpoint import save_pretrained
from ds_ulysses.deepspeed_json import BatchSizes, compute_dtype, load_deepspeed_json, resolve_batch_sizes, zero_stage
from ds_ulysses.engine import SequenceParallelEngine, choose_kernel
from ds_ulysses.support import head_counts, refuse_unsupported_model
from ds_ulysses.topology import init_distributed
from train.arguments import SftArguments, parse_arguments
from train.data import Samples, StepPlan, collate, load_rows, load_samples, plan_steps, steps_per_epoch
from train.deepspeed_auto import fill_from_arguments, fill_from_data, fill_from_model
from train.files import finished_folder
from train.log import TrainingLog
from train.report import start_report


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
    samples: Samples
    sizes: BatchSizes
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
    topology = ds_ulysses.Topology.create(settings, head_counts(model_config))
    sizes = resolve_batch_sizes(config, topology.dp_size)
    choose_kernel(model_config, compute_dtype(config), topology)
    fill_from_model(config, model_config.hidden_size)

    tokenizer = load_tokenizer(arguments.model_name_or_path)
    samples = read_data(arguments, tokenizer, topology.rank)
    num_steps = count_steps(arguments, len(samples), sizes)
    fill_from_data(config, num_steps)
    say(topology.rank, start_report(topology, config, model_config, samples, sizes, arguments.seed))
    if arguments.dry_run:
        return None
    set_seed(arguments.seed)
    engine = build_engine(arguments, config, num_steps)
    return Run(arguments, engine, tokenizer, samples, sizes, num_steps)


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


def load_model_config(name: str) -> Any:
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"Cannot load the model {name!r}: {error}") from error


def load_tokenizer(name: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"Cannot load the tokenizer of {name!r}: {error}") from error


def read_data(arguments: SftArguments, tokenizer: Any, rank: int) -> Samples:
    """Tokenise on the first rank; the others then find the result in the cache of `datasets`, or hear its refusal."""

    def read() -> Samples:
        return load_samples(load_rows(arguments.dataset, arguments.dataset_split), tokenizer, arguments.max_length)

    samples, refusal = None, [""]
    if rank == 0:
        try:
            samples = read()
        except ValueError as error:
            refusal = [str(error)]
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0]:
        raise ValueError(refusal[0])
    return samples or read()


def count_steps(arguments: SftArguments, num_samples: int, sizes: BatchSizes) -> int:
    if arguments.max_steps > 0:
        return arguments.max_steps
    return max(1, round(arguments.num_train_epochs * steps_per_epoch(num_samples, sizes)))


def build_engine(arguments: SftArguments, config: dict[str, Any], num_steps: int) -> SequenceParallelEngine:
    """Load the model, sharded from the start under ZeRO-3, and hand it to DeepSpeed with its schedule."""
    zero3 = HfDeepSpeedConfig(config) if zero_stage(config) == 3 else None  # transformers looks for a live one
    model = AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path, dtype=compute_dtype(config))
    del zero3
    if arguments.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    dims = {p: len(getattr(p, "ds_shape", p.shape)) for p in model.parameters()}  # ZeRO-3 holds flat pieces
    matrices, vectors = [p for p, n in dims.items() if n > 1], [p for p, n in dims.items() if n < 2]
    schedule = partial(
        get_scheduler,
        arguments.lr_scheduler_type,
        num_warmup_steps=arguments.warmup_steps,
        num_training_steps=num_steps,
    )
    engine, *_ = ds_ulysses.initialize(
        model=model.train(),
        config=config,
        model_parameters=[{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr_scheduler=None if "scheduler" in config else schedule,
    )
    return engine


def train(run: Run) -> None:
    """The loop over optimizer steps."""
    topology, output_dir = run.engine.topology, Path(run.arguments.output_dir)
    plan = plan_steps(len(run.samples), run.sizes, topology.dp_size, run.arguments.seed)
    with TrainingLog(output_dir, run.num_steps, writes=topology.rank == 0) as log:
        for number, step in enumerate(islice(plan, run.num_steps), start=1):
            learning_rate = run.engine.get_lr()[0]
            loss = train_step(run.engine, run.samples, step)
            log.step(
                int(run.samples.lengths[step.indices].sum()),
                step=number,
                epoch=step.epoch,
                loss=loss,
                learning_rate=learning_rate,
                grad_norm=run.engine.get_global_grad_norm(),
            )


def train_step(engine: SequenceParallelEngine, samples: Samples, step: StepPlan) -> float:
    """One optimizer step; returns the mean loss over the targets of all its samples."""
    num_targets = samples.num_targets[step.indices].sum(dim=(1, 2))
    weights = (num_targets / num_targets.sum()).tolist()
    step_loss = 0.0
    for indices, weight in zip(step.indices, weights, strict=True):
        batch = collate(samples.rows, indices[engine.topology.dp_rank])
        loss = engine(**ds_ulysses.shard_batch(batch, engine.topology)).loss
        engine.backward(loss)
        engine.step()
        step_loss += weight * loss.detach()
    return float(step_loss)


def save(engine: SequenceParallelEngine, tokenizer: Any, output_dir: Path) -> None:
    """Model and tokenizer, whole or not at all."""
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
