"""Supervised fine-tuning of a Hugging Face model on sequences that are split over ranks.

    deepspeed train/sft.py --config train/recipes/smollm2_python_docs.yaml
    deepspeed train/sft.py --model_name_or_path M --dataset D --deepspeed ds_configs/zero3.json --output_dir OUT

Everything that can be refused is refused before the data is read; everything is said before it is done. Nothing here is
out of reach of a loop of your own: `settle` and `initialize` are all that stands between a model and its engine.
"""

from __future__ import annotations

from pathlib import Path

from ds_ulysses.comm import leave
from ds_ulysses.config import load_deepspeed_json
from ds_ulysses.data import Batching
from ds_ulysses.engine import Start, init_distributed, settle
from ds_ulysses.models import load_model_config, load_tokenizer
from ds_ulysses.training import (
    Progress,
    Run,
    SftArguments,
    build_engine,
    check_disk_space,
    check_output,
    choose_batching,
    choose_eval_batching,
    ending_in_one_line,
    facts_of_ranks,
    facts_of_steps,
    fill_from_arguments,
    fill_from_data,
    fill_from_model,
    find_checkpoint,
    num_steps_of,
    overview,
    parse_arguments,
    prepare_state,
    read_data,
    read_eval_data,
    read_progress,
    restore,
    save_model,
    say,
    share_cores,
    train,
)


def main() -> None:
    with ending_in_one_line():
        run = prepare()
        if run is None:
            return
        check_disk_space(run)
        if train(run):
            save_model(run)
            say(run.rank, f"saved in {run.output_dir}")
        else:
            say(run.rank, f"stopped after step {run.progress.step}; go on with --resume_from_checkpoint latest")
    leave()


def prepare() -> Run | None:
    """Check, read, report and build; None after a dry run."""
    arguments = parse_arguments()
    checkpoint = find_checkpoint(arguments.resume_from_checkpoint, Path(arguments.output_dir))
    check_output(arguments)
    share_cores()
    config = fill_from_arguments(load_deepspeed_json(arguments.deepspeed), arguments, init_distributed())
    model_config = load_model_config(arguments.model_name_or_path)
    start = settle(model_config, config)
    fill_from_model(start.config, model_config.hidden_size)
    return build(arguments, start, choose_batching(arguments, start), checkpoint)


def build(arguments: SftArguments, start: Start, batching: Batching, checkpoint: Path | None) -> Run | None:
    """Read the data, say what comes of it, and make the engine."""
    tokenizer = load_tokenizer(arguments.model_name_or_path)
    samples, eval_samples = read_data(arguments, tokenizer), read_eval_data(arguments, tokenizer)
    num_steps = num_steps_of(arguments, samples, batching)
    fill_from_data(start.config, num_steps)
    data, ranks = facts_of_steps(arguments, samples, batching), facts_of_ranks(start)
    progress, saved = read_progress(checkpoint, data) if checkpoint else (Progress(), {})
    say(start.topology.rank, overview(start, samples, batching, eval_samples))
    if checkpoint:
        say(start.topology.rank, f"{'resume':>10}  from {checkpoint}, after step {progress.step} of {num_steps}")
    if arguments.dry_run:
        return None
    if checkpoint:
        prepare_state(checkpoint, saved, ranks, start.config)

    run = Run(
        arguments=arguments,
        engine=build_engine(arguments, start, num_steps),
        tokenizer=tokenizer,
        samples=samples,
        batching=batching,
        num_steps=num_steps,
        eval_samples=eval_samples,
        eval_batching=choose_eval_batching(arguments, batching),
        progress=progress,
        facts=data | ranks,
    )
    if checkpoint:
        restore(run, checkpoint)
    return run


if __name__ == "__main__":
    main()
