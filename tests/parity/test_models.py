"""Every architecture that is called exact: logits, loss and gradients, packed, at sp 2 and 4, with every strategy."""

from __future__ import annotations

from typing import Any

import pytest

from ds_ulysses.models.support import EXACT_MODEL_TYPES
from tests.distributed import run_ranks
from tests.models import ARCHITECTURES
from tests.parity.architecture import RTOL, check_architecture
from tests.parity.models_table import rows_in_docs
from tests.quick import slow

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 5.0, 9.0, 20.0],
}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("phi3", {"pad_token_id": 0, "rope_parameters": LONGROPE, "original_max_position_embeddings": 8}),
    "dynamic NTK": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 8}),
    "dynamic NTK by layer": (
        "gemma3_text",
        {
            **ARCHITECTURES["gemma3_text"], "max_position_embeddings": 8,
            "rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": DEFAULT},
        },
    ),
    "bidirectional": ("llama", {"is_causal": False}),
    "bidirectional window": ("mistral", {"is_causal": False, "sliding_window": 3}),
    "bidirectional Gemma": ("gemma3_text", {**ARCHITECTURES["gemma3_text"], "use_bidirectional_attention": True}),
    "experts without a balancing loss": ("mixtral", {**ARCHITECTURES["mixtral"], "output_router_logits": False}),
}  # fmt: skip
"""Settings within an architecture: lengths between the thresholds of RoPE are in one pack."""


@pytest.mark.parametrize("world", [2, slow(4)])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_architecture(kind: str, world: int) -> None:
    run_ranks(check_architecture, world, kind, ARCHITECTURES[kind])


@pytest.mark.parametrize("world", [2, slow(4)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant(variant: str, world: int) -> None:
    run_ranks(check_architecture, world, *VARIANTS[variant])


def test_every_architecture_that_is_called_exact_is_tested_and_in_the_docs() -> None:
    assert list(ARCHITECTURES) == list(EXACT_MODEL_TYPES) == list(rows_in_docs())
    assert all(error <= RTOL for error in rows_in_docs().values())
