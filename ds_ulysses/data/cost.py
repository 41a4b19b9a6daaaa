"""What a document costs to train on: a part for each token, and one for each pair of tokens that see each other.

Floating-point operations of forward and backward, recomputation aside: 6 for each weight that a token meets, and for
causal attention 3.5 * H * (D + E) * l^2 in each layer, for H heads of D and E channels of keys and values.
Only ratios count, so ranks that share a sequence, which all do an equal part, need not be told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ds_ulysses.models import empty_model, facts, num_active_weights


class Cost(NamedTuple):
    """The cost of l tokens: linear * l + quadratic * l^2 + windowed * n * (2 * l - n), where n = min(l, window)."""

    linear: float
    quadratic: float
    windowed: float = 0.0
    """As `quadratic`, of the layers that see no further than `window` tokens."""
    window: int = 0

    def of_each(self, lengths: Sequence[int]) -> list[float]:
        """Return the costs of documents of so many tokens."""
        length = np.asarray(lengths, dtype=float)
        near = np.minimum(length, self.window)
        costs = length * (self.linear + self.quadratic * length) + self.windowed * near * (2 * length - near)
        return list(costs.tolist())

    def model_flops(self, lengths: Sequence[int]) -> float:
        """Count operations as model FLOPs utilisation does: causal pairs alone, nothing that is computed again.

        Of the 7 products of a flash kernel one is a repetition, which leaves 6.
        """
        counted = self._replace(quadratic=self.quadratic * 6 / 7, windowed=self.windowed * 6 / 7)
        return sum(counted.of_each(lengths))

    @property
    def crossover(self) -> float:
        """The tokens of a document at which attention over all of it costs as much as all else."""
        return self.linear / self.quadratic if self.quadratic else math.inf


def cost_of(config: Any) -> Cost:
    """Return the cost by the model's config alone; no weights are made."""
    num_heads, _ = facts.head_counts(config)
    of_layer = 3.5 * num_heads * sum(facts.head_dims(config)) * (2 if facts.is_bidirectional(config) else 1)
    num_windowed = facts.num_windowed_layers(config)
    quadratic, windowed = of_layer * (config.num_hidden_layers - num_windowed), of_layer * num_windowed
    return Cost(6.0 * num_active_weights(empty_model(config)), quadratic, windowed, facts.window(config) or 0)
