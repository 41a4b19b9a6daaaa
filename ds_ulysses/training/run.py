"""What a training run consists of, and where it stands."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_ulysses.config import zero_stage
from ds_ulysses.data import Batching, Samples, Stream
from ds_ulysses.engine import SequenceParallelEngine, Start
from ds_ulysses.training.arguments import SftArguments
from ds_ulysses.training.evaluation import Evaluation


@dataclass
class Progress:
    """The part of a checkpoint that tells of the run, besides DeepSpeed's state."""

    step: int = 0
    """Optimizer steps done."""
    num_tokens: int = 0
    """Real tokens trained on."""
    best_eval_loss: float = math.inf
    best_step: int = 0
    """After which it was found; 0 before the first evaluation."""
    num_evals_without_gain: int = 0

    def note(self, evaluation: Evaluation) -> None:
        """Keep the lowest loss, where it was found, and how many evaluations ago."""
        if evaluation.loss < self.best_eval_loss:
            self.best_eval_loss, self.best_step, self.num_evals_without_gain = evaluation.loss, self.step, 0
        else:
            self.num_evals_without_gain += 1


@dataclass
class Run:
    """All that a training run needs."""

    arguments: SftArguments
    engine: SequenceParallelEngine
    tokenizer: Any
    samples: Samples | Stream
    batching: Batching
    num_steps: int
    eval_samples: Samples | None = None
    eval_batching: Batching | None = None
    progress: Progress = field(default_factory=Progress)
    facts: dict[str, Any] = field(default_factory=dict)
    """What a run that goes on with a checkpoint of this one must agree with, or be converted for."""

    @property
    def rank(self) -> int:
        """The rank's place among all ranks."""
        return self.engine.topology.rank

    @property
    def gives_up(self) -> bool:
        """Whether evaluations have not got better for as long as was asked."""
        return self.progress.num_evals_without_gain == self.arguments.early_stopping_patience

    @property
    def output_dir(self) -> Path:
        """The folder that the run writes into."""
        return Path(self.arguments.output_dir)


def facts_of_steps(arguments: SftArguments, samples: Samples | Stream, batching: Batching) -> dict[str, Any]:
    """Return what decides which samples a step takes, and what it trains: a run that goes on must have the same."""
    return {
        "samples": len(samples) if isinstance(samples, Samples) else "a stream",
        "tokens": int(samples.lengths.sum()) if isinstance(samples, Samples) else None,
        "seed": arguments.seed,
        "max_length": arguments.max_length,
        "packing": arguments.packing,
        "dataset_weights": arguments.dataset_weights,
        "samples or packs per step": batching.sizes.train,
        "lora_r": arguments.lora_r if arguments.use_peft else None,
    }


def facts_of_ranks(start: Start) -> dict[str, int]:
    """Return what decides how DeepSpeed cuts its state."""
    return {"ranks": start.topology.world_size, "ZeRO stage": zero_stage(start.config)}
