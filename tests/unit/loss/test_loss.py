"""The tiled loss equals torch's on whole logits, and never holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from ds_ulysses.config.constants import IGNORE_INDEX
from ds_ulysses.loss.cross_entropy import LogitsTransform, tiled_cross_entropy
from ds_ulysses.loss.mean import StepNormalizer


def problem(num_targets_per_tile: list[int], tile: int, dtype: torch.dtype = torch.double) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = tile * len(num_targets_per_tile)
    hidden = torch.randn(2, tokens // 2, 6, generator=generator, dtype=dtype)
    weight = torch.randn(11, 6, generator=generator, dtype=dtype)
    targets = torch.full((tokens,), IGNORE_INDEX)
    for index, count in enumerate(num_targets_per_tile):
        targets[index * tile : index * tile + count] = torch.randint(0, 11, (count,), generator=generator)
    return [hidden.requires_grad_(), weight.requires_grad_(), targets.view(2, -1)]


@pytest.mark.parametrize("tile_size", [1, 3, 5, 16, 100])
@pytest.mark.parametrize("counts", [[0, 1, 4, 4], [4, 4, 4, 4], [0, 0, 0, 0]], ids=str)
def test_equals_cross_entropy_with_an_upstream_gradient(counts: list[int], tile_size: int) -> None:
    hidden, weight, targets = problem(counts, 4)
    loss = tiled_cross_entropy(hidden, weight, targets, tile_size)
    found = torch.autograd.grad(3.0 * loss, [hidden, weight])
    right = cross_entropy(
        (hidden @ weight.T).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    expected = torch.autograd.grad(3.0 * right, [hidden, weight])
    torch.testing.assert_close(loss, right, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("transform", [LogitsTransform(0.3), LogitsTransform(1.0, 0.7), LogitsTransform(2.0, 1.5)])
def test_scaled_and_capped_logits(transform: LogitsTransform) -> None:
    hidden, weight, targets = problem([0, 1, 4, 4], 4)
    loss = tiled_cross_entropy(hidden, weight, targets, 3, transform)
    logits = transform.scale * (hidden @ weight.T).flatten(0, 1)
    if transform.cap:
        logits = transform.cap * torch.tanh(logits / transform.cap)
    right = cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    torch.testing.assert_close(loss, right, rtol=1e-12, atol=1e-12)
    found, expected = (torch.autograd.grad(3.0 * x, [hidden, weight]) for x in (loss, right))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_frozen_output_layer_gets_no_gradient() -> None:
    hidden, weight, targets = problem([4, 4], 4)
    frozen = weight.detach()
    found = torch.autograd.grad(tiled_cross_entropy(hidden, frozen, targets, 3), hidden)
    expected = torch.autograd.grad(tiled_cross_entropy(hidden, weight, targets, 3), hidden)
    torch.testing.assert_close(found, expected)


def test_half_precision_sums_over_tiles_in_fp32() -> None:
    hidden, weight, targets = problem([64] * 8, 64)
    low = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    high = [x.detach().double().requires_grad_() for x in low]
    one = torch.autograd.grad(tiled_cross_entropy(*low, targets, 512), low)
    many = torch.autograd.grad(tiled_cross_entropy(*low, targets, 8), low)
    exact = torch.autograd.grad(tiled_cross_entropy(*high, targets, 512), high)
    for few, tiled, right in zip(one, many, exact, strict=True):
        assert (tiled - right).norm() <= 1.5 * (few - right).norm() + 1e-3 * right.norm()


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_tensor_of_all_logits_ever_exists() -> None:
    vocabulary, tokens, tile, width = 4096, 2048, 128, 8
    hidden = torch.randn(1, tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(0, vocabulary, (1, tokens))
    with LargestTensor() as largest:
        tiled_cross_entropy(hidden, weight, targets, tile).backward()
    assert largest.elements == tile * vocabulary


def test_tokens_without_a_target_are_not_computed() -> None:
    hidden, weight, targets = problem([1, 0, 0, 0], 4)
    with LargestTensor() as largest:
        tiled_cross_entropy(hidden, weight, targets, 16).backward()
    assert largest.elements == hidden.numel()


def test_step_normalizer_divides_by_the_targets_of_the_whole_step() -> None:
    normalizer = StepNormalizer()
    normalizer.factor = 4.0
    for counts in ([3, 11], [5], [0, 7], [0, 0], [2, 0, 9]):
        weights = [normalizer.weight(torch.tensor(float(n)), torch.tensor(100.0)) for n in counts]
        missing = normalizer.close()
        assert len({float(w) for w in weights}) == 1
        assert (missing is None) == (len(counts) == 1)
        if sum(counts):
            final = float(weights[0]) * (1.0 if missing is None else float(missing))
            assert final == pytest.approx(4.0 / sum(counts))
