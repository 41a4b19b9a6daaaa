"""The CUDA adapters' argument order and conventions, against stand-ins that have the libraries' own signatures.

The stand-ins compute with the eager kernel, so a swapped argument or a wrong convention changes the numbers.
The libraries themselves are tried by the `gpu` tests of the contract.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_ulysses.kernels import KERNELS, Mask
from ds_ulysses.kernels import flash_attn as adapters
from tests.unit.kernels.test_kernels import assert_contract, inputs

EAGER = KERNELS["eager"]
SHAPES = [(2, 6, 6, 4, 2), (1, 3, 9, 6, 3), (1, 9, 3, 2, 2), (1, 0, 4, 2, 1)]
WINDOWS = [(-1, 0), (-1, -1), (2, 0), (1, 2)]


def fa2_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: None, return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
    assert causal == (window_size_right == 0)
    out, lse = EAGER.forward(q, k, v, Mask(softmax_scale, window_size_left, window_size_right, softcap))
    return out, lse.masked_fill(lse == float("-inf"), float("inf")), None, None


def fa2_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: None, deterministic: bool, rng_state: None = None,
) -> None:  # fmt: skip
    assert not (softmax_lse == float("-inf")).any()
    assert causal == (window_size_right == 0)
    lse = softmax_lse.masked_fill(softmax_lse == float("inf"), float("-inf"))
    mask = Mask(softmax_scale, window_size_left, window_size_right, softcap)
    EAGER.backward(dout, (q, k, v), out, lse, mask, (dq, dk, dv))


def fa3_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: None, v_new: None, qv: None, out: None, cu_seqlens_q: None,
    cu_seqlens_k: None, cu_seqlens_k_new: None, seqused_q: None, seqused_k: None, max_seqlen_q: None,
    max_seqlen_k: None, page_table: None, kv_batch_idx: None, leftpad_k: None, rotary_cos: None, rotary_sin: None,
    seqlens_rotary: None, q_descale: None, k_descale: None, v_descale: None, softmax_scale: float, causal: bool,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: None = None, num_splits: int = 1, pack_gqa: None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert causal == (window_size[1] == 0)
    return EAGER.forward(q, k, v, Mask(softmax_scale, *window_size, softcap))


def fa3_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, cu_seqlens_q: None,
    cu_seqlens_k: None, sequed_q: None, sequed_k: None, max_seqlen_q: None, max_seqlen_k: None, dq: Tensor,
    dk: Tensor, dv: Tensor, softmax_scale: float, causal: bool, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0,
) -> None:  # fmt: skip
    EAGER.backward(dout, (q, k, v), out, softmax_lse, Mask(softmax_scale, *window_size, softcap), (dq, dk, dv))


def fa4_forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    softcap: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
    return_lse: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    out, lse = EAGER.forward(q, k, v, fa4_mask(softmax_scale, causal, softcap, window_size_left, window_size_right))
    return out, lse if return_lse else None, None, None, None


def fa4_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float | None = None,
    causal: bool = False, softcap: float = 0.0, window_size_left: int | None = None,
    window_size_right: int | None = None, dq: Tensor | None = None, dk: Tensor | None = None,
    dv: Tensor | None = None,
) -> None:  # fmt: skip
    assert dq is not None
    assert dk is not None
    assert dv is not None
    mask = fa4_mask(softmax_scale, causal, softcap, window_size_left, window_size_right)
    EAGER.backward(dout, (q, k, v), out, lse, mask, (dq, dk, dv))


def fa4_mask(scale: float | None, causal: bool, softcap: float | None, left: int | None, right: int | None) -> Mask:
    assert scale is not None
    if causal:
        assert (left, right) == (None, None)
        return Mask(scale, -1, 0, softcap or 0.0)
    return Mask(scale, -1 if left is None else left, -1 if right is None else right, softcap or 0.0)


LIBRARIES = {
    "flash_attn_2": SimpleNamespace(_flash_attn_forward=fa2_forward, _flash_attn_backward=fa2_backward),
    "flash_attn_3": SimpleNamespace(_flash_attn_forward=fa3_forward, _flash_attn_backward=fa3_backward),
    "flash_attn_4": SimpleNamespace(_flash_attn_fwd=fa4_forward, _flash_attn_bwd=fa4_backward),
}


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", LIBRARIES)
def test_arguments(name: str, window: tuple[int, int], softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_load", lambda module: LIBRARIES[name])
    for shape in SHAPES:
        assert_contract(KERNELS[name], shape, Mask(0.3, *window, softcap))


def test_torch_varlen_arguments_and_shapes() -> None:
    """The op itself needs CUDA; its shape function does not, and it checks the arguments."""
    kernel, mask = KERNELS["torch_varlen"], Mask(0.3, 4, 0)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q, k, v, dout = (mode.from_tensor(x.contiguous()) for x in inputs((2, 6, 9, 4, 2), dtype=torch.bfloat16))
        out, lse = kernel.forward(q, k, v, mask)
        assert (out.shape, lse.shape) == (q.shape, (2, 4, 6))
        kernel.backward(dout, (q, k, v), out, lse, mask, (q.clone(), k.clone(), v.clone()))
