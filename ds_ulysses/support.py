"""Which models are exact under sequence parallelism, and why the others are refused.

Only configs and module attributes are looked at, so a refusal comes before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ds_ulysses.kernels import Request

EXACT_MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""`config.model_type` of the architectures that the tests compare with one process."""

FULL_ATTENTION = ("full_attention", "sliding_attention")
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class Obstacle(NamedTuple):
    """A property of a config that sequence parallelism cannot serve."""

    applies: Callable[[Any], bool]
    field: Callable[[Any], str]
    reason: str


def _layer_types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or [])


def _mixers(config: Any) -> list[str]:
    """Layer types that mix tokens by other means than attention over the whole sequence."""
    return sorted(set(_layer_types(config)) - set(FULL_ATTENTION))


def _rope_type(config: Any) -> str:
    parameters = getattr(config, "rope_parameters", None) or {}
    return str(parameters.get("rope_type", "default"))


OBSTACLES = (
    Obstacle(
        lambda c: bool(getattr(c, "is_encoder_decoder", False)),
        lambda c: "is_encoder_decoder=True",
        "cross-attention between two sequences is not sharded",
    ),
    Obstacle(
        lambda c: bool(getattr(c, "sub_configs", None)),
        lambda c: f"sub-models {', '.join(sorted(c.sub_configs))}",
        "only text models are supported; image or audio towers would be left out of the exchange",
    ),
    Obstacle(
        lambda c: bool(_mixers(c)),
        lambda c: f"layer_types {', '.join(_mixers(c))}",
        "these layers carry state from token to token outside attention, which would restart at every shard",
    ),
    Obstacle(
        lambda c: bool(getattr(c, "num_local_experts", None) or getattr(c, "num_experts", None)),
        lambda c: "a mixture of experts",
        "its auxiliary loss is a mean over tokens that are on other ranks",
    ),
    Obstacle(
        lambda c: _rope_type(c) in LENGTH_DEPENDENT_ROPE,
        lambda c: f"rope_type={_rope_type(c)!r}",
        "it chooses frequencies by the length it sees, and each rank sees only its shard",
    ),
    Obstacle(
        lambda c: bool(getattr(c, "attention_dropout", 0.0)),
        lambda c: f"attention_dropout={c.attention_dropout}",
        "no kernel here drops attention weights, and it would be ignored. Set it to 0",
    ),
    Obstacle(
        lambda c: not getattr(c, "is_causal", True),
        lambda c: "is_causal=False",
        "bidirectional attention is not supported yet",
    ),
)


def head_dim(config: Any) -> int:
    """Channels of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def attention_request(config: Any, device: str, dtype: torch.dtype) -> Request:
    """What a model's layers will ask of a kernel."""
    return Request(device, dtype, head_dim(config), windowed="sliding_attention" in _layer_types(config))


def refuse_unsupported_model(config: Any) -> None:
    """Raise `ValueError` that names the model, the field and the reason, unless the model is known to be exact."""
    name = f"{config.model_type} model"
    for applies, field, reason in OBSTACLES:
        if applies(config):
            raise ValueError(f"This {name} cannot be trained with sequence parallelism: {field(config)}: {reason}.")
    if config.model_type not in EXACT_MODEL_TYPES:
        raise ValueError(
            f"This {name} cannot be trained with sequence parallelism: its exactness has not been tested. Tested are: "
            f"{', '.join(EXACT_MODEL_TYPES)}."
        )
