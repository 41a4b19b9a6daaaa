"""Every local kernel keeps the contract with a table of segments too: one call for all of a packed row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ulysses.kernels import KERNELS, Mask, Segment, Segments
from tests.unit.kernels.test_kernels import (
    GPU_KERNELS,
    SCALE,
    Sizes,
    assert_contract,
    cuda_kernel,
    inputs,
    reference,
    run,
    seen_by,
    table_of,
)


def test_a_table_with_gaps() -> None:
    """Borders are cu_seqlens of every token, with segments of no keys or no queries where nobody attends."""
    table = table_of([(2, 0), (3, 4), (0, 2), (1, 1), (2, 0)])
    assert table.q_borders == (0, 2, 5, 5, 6, 8)
    assert table.k_borders == (0, 0, 4, 6, 7, 7)
    assert (table.max_q, table.max_k, table.fills_queries, table.fills_keys) == (3, 4, False, False)
    q, k = table.cu_seqlens(torch.device("cpu"))
    assert (q.tolist(), k.tolist(), q.dtype) == (list(table.q_borders), list(table.k_borders), torch.int32)
    assert table.cu_seqlens(torch.device("cpu"))[0] is q
    with pytest.raises(AssertionError, match="overlap"):
        Segments([Segment(0, 3, 0, 3), Segment(2, 4, 3, 5)], 4, 5)


@pytest.mark.parametrize("name", ["cpu_flash", "eager"])
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5), st.integers(1, 2),
    st.integers(1, 3), st.integers(-1, 6), st.integers(-1, 3),
)  # fmt: skip
def test_contract_with_a_table(name: str, sizes: Sizes, kv_heads: int, group: int, left: int, right: int) -> None:
    table = table_of(sizes)
    shape = (1, table.q_borders[-1], table.k_borders[-1], kv_heads * group, kv_heads)
    assert_contract(KERNELS[name], shape, Mask(SCALE, left, right), table)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (15, 0)])
@pytest.mark.parametrize("name", GPU_KERNELS)
def test_contract_with_a_table_on_cuda(name: str, window: tuple[int, int]) -> None:
    """Segments with gaps before, between and behind them, of queries and of keys."""
    table = table_of([(5, 0), (64, 64), (0, 9), (1, 70), (33, 33), (7, 0)])
    shape = (1, table.q_borders[-1], table.k_borders[-1], 4, 2)
    mask = Mask(0.1, *window)
    q, k, v, dout = inputs(shape, 64, torch.bfloat16)
    out, lse, grads = run(cuda_kernel(name), q.cuda(), k.cuda(), v.cuda(), dout.cuda(), mask, table)
    right, right_grads = reference(q, k, v, dout, mask, table)
    for found, expected in zip([out, *grads], [right, *right_grads], strict=True):
        assert (found.double().cpu() - expected).abs().max() <= 0.02 * expected.abs().max()
    empty = ~seen_by(shape[1], shape[2], mask, table).any(dim=1)
    assert torch.equal(lse.cpu() == float("-inf"), empty.expand_as(lse))
