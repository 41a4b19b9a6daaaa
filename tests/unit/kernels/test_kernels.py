"""Every local kernel keeps the one contract, measured against attention written out in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_ulysses.kernels import KERNELS, Kernel, Mask, Request, Segment, Segments, Triple, merge, select_kernel
from ds_ulysses.kernels.masks import empty_rows, visible
from tests import oracle

GPU_KERNELS = ["flash_attn_4", "flash_attn_3", "flash_attn_2", "torch_varlen"]
SCALE = 0.4

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""q, k, v and dout."""


def inputs(shape: tuple[int, int, int, int, int], head_dim: int = 8, dtype: torch.dtype = torch.double) -> Inputs:
    """For (batch, queries, keys, heads, KV heads), as strided views like those of the exchange."""
    batch, num_queries, num_keys, heads, kv_heads = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [(num_queries, heads), (num_keys, kv_heads), (num_keys, kv_heads), (num_queries, heads)]
    q, k, v, dout = (
        (3 * torch.randn(tokens, batch, h, head_dim, generator=generator, dtype=torch.double)).to(dtype).transpose(0, 1)
        for tokens, h in sizes
    )
    return q, k, v, dout


def reference(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, segments: Segments | None = None
) -> tuple[Tensor, list[Tensor]]:
    q, k, v = (x.double().clone().requires_grad_() for x in (q, k, v))
    seen = seen_by(q.shape[1], k.shape[1], mask, segments)
    out = oracle.attention(q, k, v, seen[None, None], mask.scale, mask.softcap)
    return out, list(torch.autograd.grad(out, (q, k, v), dout.double()))


def band(num_queries: int, num_keys: int, mask: Mask) -> Tensor:
    """The contract's mask, written pair by pair."""
    offset = num_keys - num_queries
    rows = [
        [
            (mask.left < 0 or j - i - offset >= -mask.left) and (mask.right < 0 or j - i - offset <= mask.right)
            for j in range(num_keys)
        ]
        for i in range(num_queries)
    ]
    return torch.tensor(rows, dtype=torch.bool).reshape(num_queries, num_keys)


def seen_by(num_queries: int, num_keys: int, mask: Mask, segments: Segments | None) -> Tensor:
    """The band, or one for each segment, and nothing else."""
    if segments is None:
        return band(num_queries, num_keys, mask)
    seen = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    for a, b, c, d in segments.segments:
        seen[a:b, c:d] = band(b - a, d - c, mask)
    return seen


def run(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, segments: Segments | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    out, lse = kernel.forward(q, k, v, mask, segments)
    grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    kernel.backward(dout, (q, k, v), (out, lse), mask, (grads[0], grads[1], grads[2]), segments)
    for returned, written in zip(kernel.gradients(dout, (q, k, v), (out, lse), mask, segments), grads, strict=True):
        assert torch.equal(returned, written)
    return out, lse, grads


def empty_like(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def assert_contract(
    kernel: Kernel, shape: tuple[int, int, int, int, int], mask: Mask, segments: Segments | None = None
) -> None:
    q, k, v, dout = inputs(shape)
    out, lse, grads = run(kernel, q, k, v, dout, mask, segments)
    right, right_grads = reference(q, k, v, dout, mask, segments)
    torch.testing.assert_close(out, right, rtol=0, atol=1e-12)
    for grad, expected in zip(grads, right_grads, strict=True):
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-11)
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert lse.is_contiguous()
    empty = ~seen_by(q.shape[1], k.shape[1], mask, segments).any(dim=1)
    assert torch.equal(lse == float("-inf"), empty.expand_as(lse))


Sizes = list[tuple[int, int]]
"""(queries, keys) of each segment; neither is 0, or it is a gap of so many queries or keys."""


def table_of(sizes: Sizes) -> Segments:
    q = k = 0
    segments = []
    for num_queries, num_keys in sizes:
        if num_queries and num_keys:
            segments.append(Segment(q, q + num_queries, k, k + num_keys))
        q, k = q + num_queries, k + num_keys
    return Segments(segments, q, k)


@pytest.mark.parametrize("name", ["cpu_flash", "eager"])
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 2), st.integers(0, 9), st.integers(0, 9), st.integers(1, 3), st.integers(1, 3),
    st.integers(-1, 10), st.integers(-1, 4),
)  # fmt: skip
def test_contract(
    name: str, batch: int, queries: int, keys: int, kv_heads: int, group: int, left: int, right: int
) -> None:
    assert_contract(KERNELS[name], (batch, queries, keys, kv_heads * group, kv_heads), Mask(SCALE, left, right))


@pytest.mark.parametrize("name", ["cpu_flash", "eager"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 5), (4, 5), (3, 9), (6, 6), (7, 3)])
def test_causal_masks_of_any_shape(queries: int, keys: int, name: str) -> None:
    assert_contract(KERNELS[name], (2, queries, keys, 4, 2), Mask(SCALE))


def test_merging_with_a_block_that_is_not_seen() -> None:
    """It leaves a softmax alone, also one that has seen nothing yet."""
    q, k, v, _ = inputs((1, 6, 6, 2, 1))
    nothing, everything = Mask(SCALE, -1, -1), Mask(SCALE, 0, 2)
    whole = KERNELS["eager"].forward(q, k, v, everything)
    out, lse = torch.zeros_like(q), torch.full((1, 2, 6), float("-inf"), dtype=torch.double)
    for mask, tokens in ((nothing, 0), (nothing, 0), (everything, 6), (nothing, 0)):
        merge(out, lse, *KERNELS["eager"].forward(q, k[:, :tokens], v[:, :tokens], mask))
        assert not out.isnan().any()
    assert torch.equal(out, whole[0])
    assert torch.equal(lse, whole[1])


@given(st.integers(0, 9), st.integers(0, 9), st.integers(-1, 10), st.integers(-1, 10))
def test_masks_and_empty_rows(queries: int, keys: int, left: int, right: int) -> None:
    mask = Mask(SCALE, left, right)
    seen = band(queries, keys, mask)
    assert torch.equal(visible(queries, keys, mask, torch.device("cpu")), seen)
    if keys:
        before, after = empty_rows(queries, keys, mask)
        empty = torch.zeros(queries, dtype=torch.bool)
        empty[:before] = True
        empty[queries - after :] = True
        assert torch.equal(empty, ~seen.any(dim=1))


@pytest.mark.parametrize("softcap", [0.5, 20.0])
def test_eager_softcap(softcap: float) -> None:
    assert_contract(KERNELS["eager"], (2, 7, 7, 4, 2), Mask(SCALE, 3, 0, softcap))


def check_parts_of_a_softmax(kernel: Kernel, tensors: Inputs, atol: float) -> None:
    """Two halves of the keys, merged; then backward with the merged out and lse gives the whole's gradients."""
    q, k, v, dout = tensors
    full, half = Mask(SCALE, -1, -1), k.shape[1] // 2
    parts = [(k[:, :half], v[:, :half]), (k[:, half:], v[:, half:])]
    outs, lses = zip(*(kernel.forward(q, *part, full) for part in parts), strict=True)
    lse = torch.logaddexp(*lses)
    weights = [torch.exp(part - lse).transpose(1, 2)[..., None] for part in lses]
    out = sum(w * o for w, o in zip(weights, outs, strict=True)).to(q.dtype)
    right, (dq, dk, dv) = reference(q, k, v, dout, full)
    torch.testing.assert_close(out.double().cpu(), right.cpu(), rtol=0, atol=atol)
    found = []
    for part in parts:
        grads = empty_like(q, *part)
        kernel.backward(dout, (q, *part), (out, lse), full, grads)
        found.append(grads)
    torch.testing.assert_close((found[0][0] + found[1][0]).double(), dq, rtol=0, atol=10 * atol)
    torch.testing.assert_close(torch.cat([found[0][1], found[1][1]], 1).double(), dk, rtol=0, atol=10 * atol)
    torch.testing.assert_close(torch.cat([found[0][2], found[1][2]], 1).double(), dv, rtol=0, atol=10 * atol)


@pytest.mark.parametrize("name", ["cpu_flash", "eager"])
def test_backward_takes_the_statistics_of_the_whole_softmax(name: str) -> None:
    check_parts_of_a_softmax(KERNELS[name], inputs((2, 6, 10, 4, 2)), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["cpu_flash", "eager"])
def test_low_precision_is_within_its_own_rounding(name: str, dtype: torch.dtype) -> None:
    q, k, v, dout = (x / 3 for x in inputs((1, 32, 32, 4, 2), dtype=dtype))
    out, lse, grads = run(KERNELS[name], q, k, v, dout, Mask(SCALE))
    right, right_grads = reference(q, k, v, dout, Mask(SCALE))
    assert lse.dtype == torch.float32
    for found, expected in zip([out, *grads], [right, *right_grads], strict=True):
        assert found.dtype == dtype
        assert (found - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max().clamp(min=1)


def test_large_logits_do_not_overflow() -> None:
    q, k, v, dout = inputs((1, 8, 8, 2, 1))
    for kernel in (KERNELS["cpu_flash"], KERNELS["eager"]):
        out, _, grads = run(kernel, 30 * q, 30 * k, v, dout, Mask(SCALE))
        right, right_grads = reference(30 * q, 30 * k, v, dout, Mask(SCALE))
        for found, expected in zip([out, *grads], [right, *right_grads], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_auto_takes_the_first_that_can_and_says_why() -> None:
    kernel, why = select_kernel("auto", Request("cpu", torch.float32, 8))
    assert kernel.name == "cpu_flash"
    assert why == "the fastest that can"
    kernel, why = select_kernel("auto", Request("cpu", torch.float32, 8, softcap=True))
    assert (kernel.name, why) == ("eager", "the fastest that can; cpu_flash: it has no softcap")
    assert select_kernel("eager", Request("cpu", torch.float32, 8))[1] == "set in the config"


def test_a_named_kernel_that_cannot_is_refused() -> None:
    with pytest.raises(
        ValueError, match="'flash_attn_3', but it runs on cuda, not on cpu. Able here: cpu_flash, eager"
    ):
        select_kernel("flash_attn_3", Request("cpu", torch.float32, 8))
    with pytest.raises(ValueError, match="'cpu_flash', but it has no softcap"):
        select_kernel("cpu_flash", Request("cpu", torch.float32, 8, softcap=True))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 128, 128, 4, 2), (2, 96, 96, 8, 1), (1, 64, 192, 4, 4), (1, 0, 64, 4, 2)])
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (15, 0), (7, 3)])
@pytest.mark.parametrize("name", GPU_KERNELS)
def test_contract_on_cuda(name: str, window: tuple[int, int], shape: tuple[int, int, int, int, int]) -> None:
    kernel = cuda_kernel(name)
    q, k, v, dout = inputs(shape, 64, torch.bfloat16)
    mask = Mask(0.1, *window)
    out, lse, grads = run(kernel, q.cuda(), k.cuda(), v.cuda(), dout.cuda(), mask)
    right, right_grads = reference(q, k, v, dout, mask)
    for found, expected in zip([out, *grads], [right, *right_grads], strict=True):
        error = (found.double().cpu() - expected).abs().max() if expected.numel() else torch.zeros(())
        assert error <= 0.02 * (expected.abs().max() if expected.numel() else 1)
    empty = ~band(shape[1], shape[2], mask).any(dim=1)
    assert torch.equal(lse.cpu() == float("-inf"), empty.expand_as(lse))


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_KERNELS)
def test_parts_of_a_softmax_on_cuda(name: str) -> None:
    q, k, v, dout = ((x / 3).cuda() for x in inputs((1, 64, 128, 4, 2), 64, torch.bfloat16))
    kernel = cuda_kernel(name)
    out, lse = kernel.forward(q, k, v, Mask(0.1, -1, -1))
    grads = empty_like(q, k, v)
    kernel.backward(dout, (q, k, v), (out, lse), Mask(0.1, -1, -1), grads)
    part = empty_like(q, k[:, :64], v[:, :64])
    kernel.backward(dout, (q, k[:, :64], v[:, :64]), (out, lse), Mask(0.1, -1, -1), part)
    for whole, half in zip(grads[1:], part[1:], strict=True):
        torch.testing.assert_close(half, whole[:, :64], rtol=0.02, atol=0.02)


def cuda_kernel(name: str) -> Kernel:
    refusal = KERNELS[name].refusal(Request("cuda", torch.bfloat16, 64))
    if refusal is not None:
        pytest.skip(f"{name}: {refusal}")
    return KERNELS[name]
