"""Command-line arguments of `sft.py`, by the names that TRL and Hugging Face users know."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser
from transformers.trainer_utils import SchedulerType

from ds_ulysses.config import or_shipped

MONITORS = ("tensorboard", "wandb")


@dataclass
class SftArguments:
    """Supervised fine-tuning on sequences that are split over ranks."""

    model_name_or_path: str = field(default="", metadata={"help": "Model folder or hub name. Required."})
    dataset: list[str] = field(
        default_factory=list,
        metadata={
            "aliases": ["--dataset_name"],
            "help": "One or more .jsonl, .json or .parquet files, or dataset names, with `messages`, or `prompt` and "
            "`completion`. Required.",
        },
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of a dataset that is given by name."})
    dataset_weights: list[float] | None = field(
        default=None,
        metadata={
            "help": "How often each dataset is drawn from, until all have been used up once, those that end earlier "
            "more often. Default: each sample once."
        },
    )
    streaming: bool = field(default=False, metadata={"help": "Read and tokenise as needed; needs --max_steps."})
    eval_dataset: list[str] = field(
        default_factory=list, metadata={"help": "As --dataset, for evaluation; never streamed."}
    )
    eval_dataset_split: str = field(default="test", metadata={"help": "Its split, if it is given by name."})
    eval_strategy: str = field(
        default="no", metadata={"help": "no, steps or epoch: when to evaluate; then also at the end."}
    )
    eval_steps: int = field(default=100, metadata={"help": "Optimizer steps between two evaluations."})
    eval_on_start: bool = field(default=False, metadata={"help": "Evaluate before the first step too."})
    per_device_eval_batch_size: int | None = field(
        default=None, metadata={"help": "Samples of a micro-batch in evaluation. Default: as in training."}
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop when so many evaluations in a row did not lower the loss."}
    )
    load_best_model_at_end: bool = field(
        default=False, metadata={"help": "Save, at the end, the model of the evaluation with the lowest loss."}
    )
    report_to: list[str] = field(
        default_factory=list,
        metadata={"help": "tensorboard, wandb: where the log goes too, by DeepSpeed's monitor. Default: nowhere."},
    )
    save_strategy: str = field(default="steps", metadata={"help": "no, steps or epoch: when to write a checkpoint."})
    save_steps: int = field(default=500, metadata={"help": "Optimizer steps between two checkpoints."})
    save_total_limit: int | None = field(default=None, metadata={"help": "Checkpoints to keep. Default: all."})
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={"help": "A checkpoint's folder, or latest: that of output_dir, or a new run if it has none yet."},
    )
    skip_nonfinite_steps: bool = field(
        default=False, metadata={"help": "Leave out steps whose gradient is not finite, instead of stopping."}
    )
    loss_spike_threshold: float = field(
        default=5.0,
        metadata={"help": "Standard deviations above the last steps from which a loss is reported; 0: never."},
    )
    step_timeout: int = field(
        default=0, metadata={"help": "Seconds from step to step after which ranks show their stacks and end; 0: never."}
    )
    deepspeed: str = field(default="", metadata={"help": 'DeepSpeed JSON; "auto" values are filled in. Required.'})
    output_dir: str = field(default="", metadata={"help": "Where the log and the model go. Required."})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Go on if output_dir holds files already."})
    sequence_parallel_size: int | None = field(
        default=None,
        metadata={"help": 'Ranks that share a sequence, where the JSON says "auto". Default: all ranks.'},
    )
    max_length: int = field(default=1024, metadata={"help": "Tokens of a sample, or a pack; longer samples are cut."})
    packing: bool = field(
        default=False,
        metadata={
            "help": "Put several samples in a row of up to max_length tokens; none sees another. Batch sizes "
            "then count rows."
        },
    )
    padding_free: bool = field(
        default=False, metadata={"help": "Put the samples of a micro-batch in one row instead of padding them."}
    )
    per_device_train_batch_size: int = field(
        default=1, metadata={"help": "Samples of a micro-batch, per group of ranks that share a sequence."}
    )
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Micro-batches of an optimizer step."})
    num_train_epochs: float = field(default=1.0, metadata={"help": "Passes over the data, unless max_steps is given."})
    max_steps: int = field(default=-1, metadata={"help": "Optimizer steps; -1: as many as the epochs make."})
    learning_rate: float = field(default=2e-5, metadata={"help": "Highest learning rate."})
    lr_scheduler_type: str = field(default="linear", metadata={"help": "Name of a transformers schedule."})
    warmup_steps: int = field(default=0, metadata={"help": "Optimizer steps of linear warm-up."})
    weight_decay: float = field(default=0.0, metadata={"help": "For matrices; norms and biases have none."})
    adam_beta1: float = field(default=0.9, metadata={"help": "Decay of AdamW's first moment."})
    adam_beta2: float = field(default=0.999, metadata={"help": "Decay of AdamW's second moment."})
    adam_epsilon: float = field(default=1e-8, metadata={"help": "AdamW's epsilon."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradients are clipped to this norm; 0: never."})
    bf16: bool | None = field(
        default=None, metadata={"help": 'Compute in bf16, where the JSON says "auto". Default: on a GPU, yes.'}
    )
    use_peft: bool = field(default=False, metadata={"help": "Train a LoRA adapter; the model's own weights stay."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapter."})
    lora_alpha: int = field(default=32, metadata={"help": "Its weight, times rank."})
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout in front of it."})
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={"help": "Names of the layers that get one, or all-linear. Default: what peft takes for the model."},
    )
    gradient_checkpointing: bool = field(default=True, metadata={"help": "Recompute activations in the backward."})
    seed: int = field(default=42, metadata={"help": "Of the order of samples; the same for every number of ranks."})
    dry_run: bool = field(default=False, metadata={"help": "Print what would be done, then stop."})
    local_rank: int = field(default=-1, metadata={"help": "Set by the launcher."})

    def __post_init__(self) -> None:
        for name in ("model_name_or_path", "dataset", "deepspeed", "output_dir"):
            if not getattr(self, name):
                raise ValueError(f"--{name} is missing.")
        for name in ("max_length", "per_device_train_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}, but it must be at least 1.")
        self._check_data()
        self._check_evaluation()
        self._check_saving()
        if self.use_peft and self.lora_r < 1:
            raise ValueError(f"--lora_r is {self.lora_r}, but it must be at least 1.")
        if unknown := set(self.report_to) - {"none", *MONITORS}:
            raise ValueError(f"--report_to is {', '.join(unknown)}. Choose of: none, {', '.join(MONITORS)}.")
        if self.max_length < 2:
            raise ValueError("--max_length is 1, but a sample needs a token to predict from and one to predict.")
        if self.lr_scheduler_type not in (names := [schedule.value for schedule in SchedulerType]):
            raise ValueError(f"--lr_scheduler_type is {self.lr_scheduler_type!r}. Choose one of: {', '.join(names)}.")
        if min(self.step_timeout, self.loss_spike_threshold) < 0:
            raise ValueError("--step_timeout and --loss_spike_threshold must be at least 0, which means never.")
        if self.max_steps == 0 or (self.max_steps < 0 and self.num_train_epochs <= 0):
            raise ValueError("--max_steps 0 or --num_train_epochs 0 would train nothing.")

    def _check_data(self) -> None:
        weights = self.dataset_weights
        if weights is not None and (len(weights) != len(self.dataset) or min(weights) <= 0):
            raise ValueError(
                f"--dataset_weights has {len(weights)} values for {len(self.dataset)} datasets: give each one above 0."
            )
        if self.streaming and self.max_steps < 1:
            raise ValueError("--streaming needs --max_steps: how long an epoch is, is not known beforehand.")

    def _check_evaluation(self) -> None:
        self._check_strategy("eval_strategy")
        if (self.eval_strategy != "no") != bool(self.eval_dataset):
            raise ValueError("Give --eval_strategy steps or epoch together with --eval_dataset, or neither of them.")
        if min(self.eval_steps, self.per_device_eval_batch_size or 1, self.early_stopping_patience or 1) < 1:
            raise ValueError(
                "--eval_steps, --per_device_eval_batch_size and --early_stopping_patience must be at least 1."
            )
        if self.early_stopping_patience is not None and self.eval_strategy == "no":
            raise ValueError("--early_stopping_patience watches the loss of --eval_strategy, which is no.")
        every = (self.eval_steps, self.save_steps) if self.eval_strategy == "steps" else (1, 1)
        if self.load_best_model_at_end and (
            self.eval_strategy == "no" or self.save_strategy != self.eval_strategy or every[0] % every[1]
        ):
            raise ValueError(
                "--load_best_model_at_end needs a checkpoint of every evaluation. Give the same --eval_strategy and "
                "--save_strategy, steps or epoch, and --eval_steps that are a multiple of --save_steps."
            )

    def _check_saving(self) -> None:
        self._check_strategy("save_strategy")
        if min(self.save_steps, self.save_total_limit or 1) < 1 or self.save_total_limit == 0:
            raise ValueError("--save_steps and --save_total_limit must be at least 1.")

    def _check_strategy(self, name: str) -> None:
        if (strategy := getattr(self, name)) not in ("no", "steps", "epoch"):
            raise ValueError(f"--{name} is {strategy!r}. Choose one of: no, steps, epoch.")
        if strategy == "epoch" and self.streaming:
            raise ValueError(f"--{name} epoch needs to know an epoch's end, which --streaming does not: use steps.")


def parse_arguments(argv: list[str] | None = None) -> SftArguments:
    """Parse flags, over the values of `--config recipe.yaml` if there is one. Raises `ValueError`."""
    argv = sys.argv[1:] if argv is None else argv
    recipe = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    recipe.add_argument("--config")
    known, flags = recipe.parse_known_args(argv)
    parser = HfArgumentParser(SftArguments, allow_abbrev=False, description=SftArguments.__doc__)
    parser.add_argument("--config", help="YAML file of the arguments below; flags go before its values.")
    values = _recipe_flags(or_shipped(known.config)) if known.config else []
    arguments: SftArguments = parser.parse_args_into_dataclasses(values + flags)[0]
    return arguments


def _recipe_flags(path: Path) -> list[str]:
    """A recipe as the flags that it stands for, so that both are read by the same rules."""
    try:
        recipe: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"Cannot read the recipe {path}: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"The recipe {path} is not valid YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"The recipe {path} must hold `name: value` lines.")
    if unknown := sorted(set(recipe) - {f.name for f in fields(SftArguments)}):
        raise ValueError(f"The recipe {path} has unknown arguments: {', '.join(unknown)}.")
    values = {name: value if isinstance(value, list) else [value] for name, value in recipe.items()}
    return [part for name, parts in values.items() for part in (f"--{name}", *map(str, parts))]
