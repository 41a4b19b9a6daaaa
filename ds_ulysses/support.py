"""Which models are exact under sequence parallelism, and why the others are refused.

Only configs are looked at, so a refusal comes before any weight is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
RECURRENT_MODELS = ("rwkv", "xlstm", "mamba", "mamba2", "falcon_mamba")
"""All of whose layers are recurrent, whether or not their config says so."""
ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


class Obstacle(NamedTuple):
    """A property of a config that sequence parallelism cannot serve."""

    applies: Callable[[Any], bool]
    field: Callable[[Any], str]
    reason: Callable[[Any], str]


def _layer_types(config: Any) -> list[str]:
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if not types and config.model_type in RECURRENT_MODELS:
        types = ["recurrent"]
    return list(types or [])


def _first_mixer(config: Any) -> str | None:
    """The type of the first layer that mixes tokens by other means than attention over the whole sequence."""
    return next((kind for kind in _layer_types(config) if kind in MIXERS), None)


def _mixers(config: Any) -> str:
    kind = _first_mixer(config)
    found = [index for index, other in enumerate(_layer_types(config)) if other == kind]
    return f"layer {found[0]} is {kind} ({len(found)} of {len(_layer_types(config))} layers are)"


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
        lambda c: bool(set(_layer_types(c)) - set(FULL_ATTENTION)),
        lambda c: f"layer_types {', '.join(sorted(set(_layer_types(c)) - set(FULL_ATTENTION)))}",
        lambda c: f"only {' and '.join(FULL_ATTENTION)} have been tested",
    ),
)


def head_counts(config: Any) -> tuple[int, int]:
    """Query and KV heads."""
    return config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_dims(config: Any) -> tuple[int, int]:
    """Channels of one head: of queries and keys, and of values, which differ in multi-head latent attention."""
    if rotary := getattr(config, "qk_rope_head_dim", None):
        return int(config.qk_nope_head_dim + rotary), int(config.v_head_dim)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return dim, dim


def attention_softcap(config: Any) -> bool:
    """Whether attention scores are capped, which few kernels can do."""
    return bool(getattr(config, "attn_logit_softcapping", None))


def is_bidirectional(config: Any) -> bool:
    """Whether tokens see later ones too."""
    return getattr(config, "is_causal", True) is False or bool(getattr(config, "use_bidirectional_attention", False))


def seen_distances(config: Any, window: int | None) -> tuple[int, int]:
    """How far a token of a layer with this window, or none, sees to the left and to the right; -1: no limit."""
    if not is_bidirectional(config):
        return (-1 if window is None else window - 1), 0
    if window is None:
        return -1, -1
    # As transformers masks them: Gemma counts the token itself, others do not.
    distance = window - 1 if getattr(config, "use_bidirectional_attention", False) else window
    return distance, distance


def dropouts(config: Any) -> list[str]:
    """Fields such as resid_pdrop that are not 0, except those of heads that a causal LM does not have."""
    fields = [
        name for name in sorted(vars(config)) if "drop" in name and not name.startswith(("classifier", "summary"))
    ]
    return [f"{name}={value}" for name in fields if (value := getattr(config, name))]


def logits_scale_and_cap(config: Any) -> tuple[float, float]:
    """What the logits are multiplied by, and the cap of their tanh after it; a cap of 0 means none."""
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return scale, getattr(config, "final_logit_softcapping", None) or 0.0


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
