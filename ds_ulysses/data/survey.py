"""What batching makes of the samples: micro-steps, padding, and how evenly replicas are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from ds_ulysses.data.steps import Batching, Documents, Source, StepOrder, order_epoch


@dataclass
class Survey:
    """The sums over the steps that were added. Tokens are those of all replicas."""

    batching: Batching
    sp_size: int
    num_steps: int = 0
    num_micro_steps: int = 0
    """Micro-batches one after another, on each replica."""
    num_samples: int = 0
    real_tokens: int = 0
    computed_tokens: int = 0
    """With padding, also that which lets ranks share a row."""
    padded_tokens: int = 0
    """What they would be with the samples as padded rows, in order, in as many micro-batches; for an epoch only."""
    model_flops: float = 0.0
    """Floating-point operations of the model, on all ranks."""
    longest: int = 0
    """Tokens of the longest row, filled up."""
    mean_cost: float = 0.0
    """Of the micro-batches that run at the same time, added up."""
    max_cost: float = 0.0
    """Of the costliest of them, for which the others wait."""

    @property
    def padding(self) -> float:
        """The share of the computed tokens that is padding."""
        return 1 - self.real_tokens / self.computed_tokens

    @property
    def imbalance(self) -> float:
        """The time over that which equally busy replicas would take, as they wait for one another; 1.0 is even."""
        return self.max_cost / self.mean_cost

    def add(self, order: StepOrder) -> Survey:
        """Count one step in; returns itself."""
        self.num_steps += 1
        for replicas in order.micro_batches:
            self.num_micro_steps += 1
            costs = [sum(self.batching.cost.of_each([d.length for d in documents])) for documents in replicas]
            self.max_cost += max(costs)
            self.mean_cost += sum(costs) / len(costs)
            for documents in replicas:
                self._add_micro_batch(documents)
        return self

    def _add_micro_batch(self, documents: Documents) -> None:
        lengths = [document.length for document in documents] or [1]  # an empty one has a token that weighs nothing
        num_rows, tokens = (1, sum(lengths)) if self.batching.flat else (len(lengths), max(lengths))
        self.num_samples += len(documents)
        self.model_flops += self.batching.cost.model_flops([document.length for document in documents])
        self.real_tokens += sum(document.length for document in documents)
        self.computed_tokens += num_rows * self.filled(tokens)
        self.longest = max(self.longest, self.filled(tokens))

    def filled(self, tokens: int) -> int:
        """Round the tokens up to what the ranks can share."""
        return -(-tokens // self.sp_size) * self.sp_size


def survey_epoch(source: Source, num_samples: int, batching: Batching, sp_size: int) -> Survey:
    """Survey the steps of the first epoch."""
    survey = Survey(batching, sp_size)
    for order in order_epoch(source, num_samples, batching):
        survey.add(order)
    lengths = [document.length for document in source(0, batching.seed)]
    num_rows = -(-num_samples // (survey.num_micro_steps * batching.dp_size))
    together = [lengths[i : i + num_rows] for i in range(0, num_samples, num_rows)]
    survey.padded_tokens = sum(len(rows) * survey.filled(max(rows)) for rows in together)
    return survey
