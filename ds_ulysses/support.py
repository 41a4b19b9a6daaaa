"""Which models are exact under sequence parallelism, and why the others are refused.

Only configs and module attributes are looked at, so a refusal comes before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

EXACT_MODEL_TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi3", "olmo2", "olmo3", "glm4", "smollm3",
    "starcoder2", "exaone4",
)  # fmt: skip
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


def _rope_by_length(config: Any) -> list[str]:
    """RoPE types that depend on the length; some configs give parameters per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return sorted({str(p.get("rope_type")) for p in (parameters, *nested)} & set(LENGTH_DEPENDENT_ROPE))


def _dropouts(config: Any) -> list[str]:
    """Fields such as attention_dropout and resid_pdrop that are not 0."""
    return [f"{name}={value}" for name, value in sorted(vars(config).items()) if "drop" in name and value]


def _bidirectional(config: Any) -> bool:
    return getattr(config, "is_causal", True) is False or bool(getattr(config, "use_bidirectional_attention", False))


# What a model is: refused for whatever architecture.
STRUCTURE = (
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
)

# How a model that is otherwise exact has been set.
SETTINGS = (
    Obstacle(
        lambda c: bool(_rope_by_length(c)),
        lambda c: f"rope_type {', '.join(_rope_by_length(c))}",
        "it chooses frequencies by the length it sees, and each rank sees only its shard",
    ),
    Obstacle(
        lambda c: bool(_dropouts(c)),
        lambda c: ", ".join(_dropouts(c)),
        "attention weights are not dropped here, and shards would drop the same positions. Set it to 0",
    ),
    Obstacle(
        lambda c: bool(getattr(c, "final_logit_softcapping", None)),
        lambda c: f"final_logit_softcapping={c.final_logit_softcapping}",
        "the tiled loss does not cap logits yet",
    ),
    Obstacle(_bidirectional, lambda c: "bidirectional attention", "only causal attention is supported yet"),
)


def head_dim(config: Any) -> int:
    """Channels of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def head_counts(config: Any) -> tuple[int, int]:
    """Query and KV heads."""
    return config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def refuse_unsupported_model(config: Any) -> None:
    """Raise `ValueError` that names the model, the field and the reason, unless the model is known to be exact."""
    refusal = f"This {config.model_type} model cannot be trained with sequence parallelism"
    _refuse_obstacles(STRUCTURE, config, refusal)
    if config.model_type not in EXACT_MODEL_TYPES:
        raise ValueError(f"{refusal}: it has not been tested. Tested are: {', '.join(EXACT_MODEL_TYPES)}.")
    _refuse_obstacles(SETTINGS, config, refusal)


def _refuse_obstacles(obstacles: tuple[Obstacle, ...], config: Any, refusal: str) -> None:
    for applies, field, reason in obstacles:
        if applies(config):
            raise ValueError(f"{refusal}: {field(config)}: {reason}.")
