"""The CUDA adapters' argument order and conventions, against stand-ins that have the libraries' own signatures.

The stand-ins compute with the eager kernel, so a swapped argument or a wrong convention changes the numbers.
The libraries themselves are tried by the `gpu` tests of the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_ulysses.kernels import KERNELS, Mask, Segment, Segments, Triple
from ds_ulysses.kernels import flash_attn as adapters
from tests.unit.kernels.test_kernels import assert_contract, inputs, table_of

EAGER = KERNELS["eager"]
SHAPES = [(2, 6, 6, 4, 2), (1, 3, 9, 6, 3), (1, 9, 3, 2, 2), (1, 0, 4, 2, 1)]
WINDOWS = [(-1, 0), (-1, -1), (2, 0), (1, 2)]
TABLES = [[(3, 3), (4, 4)], [(2, 0), (3, 5), (0, 2), (1, 1)], [(1, 4)]]
Table = tuple[Tensor | None, Tensor | None, int | None, int | None]
"""cu_seqlens of queries and keys, and the longest segment of each; None for whole rows."""


def segments_of(table: Table, q: Tensor, k: Tensor) -> Segments | None:
    """The table that the arguments describe, which must be one of the tokens that are there."""
    cu_q, cu_k, max_q, max_k = table
    if cu_q is None or cu_k is None:
        assert table == (None, None, None, None)
        return None
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (int(cu_q[0]), int(cu_k[0]), int(cu_q[-1]), int(cu_k[-1])) == (0, 0, q.shape[0], k.shape[0])
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    borders = zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), cu_k[:-1].tolist(), cu_k[1:].tolist(), strict=True)
    return Segments((Segment(*s) for s in borders if s[0] < s[1] and s[2] < s[3]), q.shape[0], k.shape[0])


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, table: Table) -> tuple[Tensor, Tensor]:
    """As the libraries do: rows of a batch, or without it the segments of a table."""
    segments = segments_of(table, q, k)
    if segments is None:
        return EAGER.forward(q, k, v, mask)
    out, lse = EAGER.forward(q[None], k[None], v[None], mask, segments)
    return out[0], lse[0]


def write(dout: Tensor, qkv: Triple, softmax: tuple[Tensor, Tensor], mask: Mask, grads: Triple, table: Table) -> None:
    segments = segments_of(table, qkv[0], qkv[1])
    if segments is None:
        EAGER.backward(dout, qkv, softmax, mask, grads)
        return
    rows = [[x[None] for x in tensors] for tensors in (qkv, softmax, grads)]
    EAGER.backward(dout[None], tuple(rows[0]), tuple(rows[1]), mask, tuple(rows[2]), segments)  # type: ignore[arg-type]


NO_TABLE: Table = (None, None, None, None)


def fa2_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: None, return_softmax: bool, table: Table = NO_TABLE,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
    assert causal == (window_size_right == 0)
    out, lse = attend(q, k, v, Mask(softmax_scale, window_size_left, window_size_right, softcap), table)
    return out, lse.masked_fill(lse == float("-inf"), float("inf")), None, None


def fa2_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    return fa2_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
    )  # fmt: skip


def fa2_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: None, deterministic: bool, rng_state: None = None, table: Table = NO_TABLE,
) -> None:  # fmt: skip
    assert not (softmax_lse == float("-inf")).any()
    assert causal == (window_size_right == 0)
    lse = softmax_lse.masked_fill(softmax_lse == float("inf"), float("-inf"))
    mask = Mask(softmax_scale, window_size_left, window_size_right, softcap)
    write(dout, (q, k, v), (out, lse), mask, (dq, dk, dv), table)


def fa2_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: None, deterministic: bool,
) -> None:  # fmt: skip
    table = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    fa2_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, table=table,
    )  # fmt: skip


def fa3_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: None, v_new: None, qv: None, out: None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, cu_seqlens_k_new: None, seqused_q: None, seqused_k: None, max_seqlen_q: int | None,
    max_seqlen_k: int | None, page_table: None, kv_batch_idx: None, leftpad_k: None, rotary_cos: None,
    rotary_sin: None, seqlens_rotary: None, q_descale: None, k_descale: None, v_descale: None, softmax_scale: float,
    causal: bool, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: None = None, num_splits: int = 1, pack_gqa: None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert causal == (window_size[1] == 0)
    table = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return attend(q, k, v, Mask(softmax_scale, *window_size, softcap), table)


def fa3_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, sequed_q: None, sequed_k: None, max_seqlen_q: int | None, max_seqlen_k: int | None,
    dq: Tensor, dk: Tensor, dv: Tensor, softmax_scale: float, causal: bool, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0,
) -> None:  # fmt: skip
    table = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    mask = Mask(softmax_scale, *window_size, softcap)
    write(dout, (q, k, v), (out, softmax_lse), mask, (dq, dk, dv), table)


def longest(cu_q: Tensor | None, cu_k: Tensor | None) -> Table:
    """Generation 4 need not be told the longest segment; these stand-ins work it out, as the library does."""
    if cu_q is None or cu_k is None:
        return NO_TABLE
    return cu_q, cu_k, int(cu_q.diff().max()), int(cu_k.diff().max())


def fa4_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, softcap: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, return_lse: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    mask = fa4_mask(softmax_scale, causal, softcap, window_size_left, window_size_right)
    out, lse = attend(q, k, v, mask, longest(cu_seqlens_q, cu_seqlens_k))
    return out, lse if return_lse else None, None, None, None


def fa4_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float | None = None,
    causal: bool = False, softcap: float = 0.0, window_size_left: int | None = None,
    window_size_right: int | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
) -> None:  # fmt: skip
    assert dq is not None
    assert dk is not None
    assert dv is not None
    mask = fa4_mask(softmax_scale, causal, softcap, window_size_left, window_size_right)
    write(dout, (q, k, v), (out, lse), mask, (dq, dk, dv), longest(cu_seqlens_q, cu_seqlens_k))


def fa4_mask(scale: float | None, causal: bool, softcap: float | None, left: int | None, right: int | None) -> Mask:
    assert scale is not None
    if causal:
        assert (left, right) == (None, None)
        return Mask(scale, -1, 0, softcap or 0.0)
    return Mask(scale, -1 if left is None else left, -1 if right is None else right, softcap or 0.0)


class Op:
    """A function as torch.library makes an op of it: its own signature tells nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._init_fn = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._init_fn(*args, **kwargs)


LIBRARIES = {
    "flash_attn_2": SimpleNamespace(
        _flash_attn_forward=fa2_forward,
        _flash_attn_backward=fa2_backward,
        _flash_attn_varlen_forward=Op(fa2_varlen_forward),
        _flash_attn_varlen_backward=Op(fa2_varlen_backward),
    ),
    "flash_attn_3": SimpleNamespace(_flash_attn_forward=Op(fa3_forward), _flash_attn_backward=Op(fa3_backward)),
    "flash_attn_4": SimpleNamespace(_flash_attn_fwd=fa4_forward, _flash_attn_bwd=fa4_backward),
}


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", LIBRARIES)
def test_arguments(name: str, window: tuple[int, int], softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_load", lambda module: LIBRARIES[name])
    mask = Mask(0.3, *window, softcap)
    for shape in SHAPES:
        assert_contract(KERNELS[name], shape, mask)
    for sizes in TABLES:
        table = table_of(sizes)
        assert_contract(KERNELS[name], (1, table.q_borders[-1], table.k_borders[-1], 4, 2), mask, table)


def test_torch_varlen_arguments_and_shapes() -> None:
    """The op itself needs CUDA; its shape function does not, and it checks the arguments."""
    kernel, mask = KERNELS["torch_varlen"], Mask(0.3, 4, 0)
    table = table_of([(2, 3), (4, 0), (0, 1), (3, 5)])
    for shape, segments in (((2, 6, 9, 4, 2), None), ((1, 9, 9, 4, 2), table)):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            q, k, v, dout = (mode.from_tensor(x.contiguous()) for x in inputs(shape, dtype=torch.bfloat16))
            out, lse = kernel.forward(q, k, v, mask, segments)
            assert (out.shape, lse.shape) == (q.shape, (shape[0], 4, shape[1]))
            kernel.backward(dout, (q, k, v), (out, lse), mask, (q.clone(), k.clone(), v.clone()), segments)
