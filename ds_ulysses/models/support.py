"""Which models are exact under sequence parallelism, and why the others are refused.

Only configs are looked at, so a refusal comes before any weight is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ds_ulysses.models import facts

EXACT_MODEL_TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "olmo3", "glm4", "smollm3",
    "starcoder2", "exaone4", "granite", "cohere", "cohere2", "gpt2", "gpt_neox",
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe",
)  # fmt: skip
"""`config.model_type` of the architectures that the tests compare with one process."""

FULL_ATTENTION = ("full_attention", "sliding_attention")
STATE = "it carries a state from token to token, which would restart at every shard"
MIXERS = {
    "linear_attention": STATE,
    "mamba": STATE,
    "hybrid": STATE,
    "recurrent": STATE,
    "conv": "it mixes neighbouring tokens, which are on two ranks at every shard's edge",
    "chunked_attention": "its chunks of the sequence are not among the masks that are exact",
    "cross_attention": "it attends to a second sequence, which is not sharded",
}
"""Layer types that mix tokens by other means than attention within the sequence, and what would go wrong."""
ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


class Obstacle(NamedTuple):
    """A property of a config that sequence parallelism cannot serve."""

    applies: Callable[[Any], bool]
    field: Callable[[Any], str]
    reason: Callable[[Any], str]


def _first_mixer(config: Any) -> str | None:
    """The type of the first layer that mixes tokens by other means than attention over the whole sequence."""
    return next((kind for kind in facts.layer_types(config) if kind in MIXERS), None)


def _mixers(config: Any) -> str:
    kind = _first_mixer(config)
    found = [index for index, other in enumerate(facts.layer_types(config)) if other == kind]
    return f"layer {found[0]} is {kind} ({len(found)} of {len(facts.layer_types(config))} layers are)"


def _attention_dropouts(config: Any) -> list[str]:
    return [f"{name}={value}" for name in ATTENTION_DROPOUTS if (value := getattr(config, name, 0))]


# What a model is: refused for whatever architecture.
STRUCTURE = (
    Obstacle(
        lambda c: bool(getattr(c, "is_encoder_decoder", False)),
        lambda c: "is_encoder_decoder=True, so its decoder layers have cross-attention",
        lambda c: MIXERS["cross_attention"],
    ),
    Obstacle(
        lambda c: bool(getattr(c, "add_cross_attention", False)),
        lambda c: "add_cross_attention=True",
        lambda c: MIXERS["cross_attention"],
    ),
    Obstacle(
        lambda c: bool(getattr(c, "sub_configs", None)),
        lambda c: f"sub-models {', '.join(sorted(c.sub_configs))}",
        lambda c: (
            "only text models are supported; images or audio are split before they are merged with the text. "
            "Train the text model alone"
        ),
    ),
    Obstacle(
        lambda c: _first_mixer(c) is not None,
        _mixers,
        lambda c: MIXERS[_first_mixer(c) or ""],
    ),
)

# How a model that is otherwise exact has been set.
SETTINGS = (
    Obstacle(
        lambda c: bool(_attention_dropouts(c)),
        lambda c: ", ".join(_attention_dropouts(c)),
        lambda c: "attention weights are not dropped by these kernels. Set it to 0 in the model's config",
    ),
    Obstacle(
        lambda c: bool(getattr(c, "router_jitter_noise", 0)),
        lambda c: f"router_jitter_noise={c.router_jitter_noise}",
        lambda c: "routing would differ from run to run and from rank to rank. Set it to 0 in the model's config",
    ),
    Obstacle(
        lambda c: bool(set(facts.layer_types(c)) - set(FULL_ATTENTION)),
        lambda c: f"layer_types {', '.join(sorted(set(facts.layer_types(c)) - set(FULL_ATTENTION)))}",
        lambda c: f"only {' and '.join(FULL_ATTENTION)} have been tested",
    ),
)


def refuse_unsupported_model(config: Any) -> None:
    """Raise `ValueError` that names the model, the field and the reason, unless the model is known to be exact."""
    refusal = f"This {config.model_type} model cannot be trained with sequence parallelism"
    _refuse_obstacles(STRUCTURE, config, refusal)
    if config.model_type not in EXACT_MODEL_TYPES:
        raise ValueError(f"{refusal}: it has not been tested. Tested are: {', '.join(EXACT_MODEL_TYPES)}.")
    _refuse_obstacles(SETTINGS, config, refusal)


def _refuse_obstacles(obstacles: tuple[Obstacle, ...], config: Any, refusal: str) -> None:
    for obstacle in obstacles:
        if obstacle.applies(config):
            raise ValueError(f"{refusal}: {obstacle.field(config)}: {obstacle.reason(config)}.")
