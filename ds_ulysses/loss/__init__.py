"""The loss: token-exact over all ranks and micro-batches, in tiles of the output layer; that which balances experts."""

from ds_ulysses.loss.balance import Routing, route
from ds_ulysses.loss.cross_entropy import LogitsTransform, tiled_cross_entropy
from ds_ulysses.loss.mean import StepNormalizer, causal_lm_loss

__all__ = ["LogitsTransform", "Routing", "StepNormalizer", "causal_lm_loss", "route", "tiled_cross_entropy"]
