"""The cost of a document against what PyTorch counts when the model is run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ds_ulysses.data.cost import Cost, cost_of
from tests.models import ARCHITECTURES, tiny_model

FULL = {"sliding_window": 4096, "output_router_logits": False, "experts_implementation": "eager"}


def counted(model: Any, length: int) -> float:
    """Floating-point operations of forward and backward, with eager attention over the whole square."""
    ids = torch.arange(length)[None] % 32
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    return float(counter.get_total_flops())


def fitted(model: Any) -> Cost:
    """linear * l + quadratic * l^2 through three lengths, the third to check that there is nothing else."""
    a, b, c = (counted(model, length) for length in (8, 16, 32))
    quadratic = (b - 2 * a) / (16**2 - 2 * 8**2)
    linear = a / 8 - 8 * quadratic
    assert c == pytest.approx(32 * linear + 32**2 * quadratic)
    return Cost(linear, quadratic)


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "gemma2", "granite", "gpt2", "gpt_neox", "deepseek_v3", "mixtral", "gpt_oss"]
)
def test_cost_is_what_is_computed(kind: str) -> None:
    """Of the square, 12 parts in eager mode (2 products forward, 4 backward), half of 14 with flash kernels."""
    settings = {k: v for k, v in ARCHITECTURES[kind].items() if k != "layer_types"}
    model = tiny_model(kind, attn_implementation="eager", **(settings | FULL))
    found, right = cost_of(model.config), fitted(model)
    assert found.linear == pytest.approx(right.linear)
    assert found.quadratic + found.windowed == pytest.approx(right.quadratic * 7 / 12)


def test_model_flops_are_those_that_utilisation_is_quoted_with() -> None:
    """6 N + 6 L h s a token, forward and backward, causal: the published formula, for heads that fill the width."""
    model = tiny_model("llama", num_key_value_heads=4)
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name)
    length, layers, hidden = 100, 2, 32
    right = length * (6 * weights + 6 * layers * hidden * length)
    assert cost_of(model.config).model_flops([length]) == pytest.approx(right)


def test_windows_cost_what_is_seen() -> None:
    """Pairs by counting: of 10 tokens with a window of 4, 1 + 2 + 3 + 7 * 4; a pair costs two of the square."""
    cost = Cost(0.0, 0.0, windowed=1.0, window=4)
    lengths = (1, 3, 4, 10)
    pairs = [sum(min(i + 1, 4) for i in range(length)) for length in lengths]
    diagonal = [min(length, 4) for length in lengths]  # the formula leaves it out
    assert cost.of_each(lengths) == [2 * p - d for p, d in zip(pairs, diagonal, strict=True)]
    mixed = cost_of(tiny_model("gemma3_text", **ARCHITECTURES["gemma3_text"]).config)
    whole = cost_of(tiny_model("gemma3_text", **(ARCHITECTURES["gemma3_text"] | {"layer_types": None})).config)
    assert mixed.windowed == mixed.quadratic == (whole.windowed + whole.quadratic) / 2
    assert (mixed.window, mixed.crossover) == (4, mixed.linear / mixed.quadratic)
    assert cost_of(tiny_model("mistral", sliding_window=4).config).crossover == math.inf
    assert cost_of(tiny_model("qwen2", sliding_window=4, use_sliding_window=False).config).window == 0
