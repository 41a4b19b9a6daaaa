"""What a Hugging Face config says of its model: read here, and nowhere else.

Architectures name the same thing differently; everybody who wants to know asks here. No torch, no transformers.
"""

from __future__ import annotations

from typing import Any

RECURRENT_MODELS = ("rwkv", "xlstm", "mamba", "mamba2", "falcon_mamba")
"""`model_type`s all of whose layers are recurrent, whether or not their config says so."""


def layer_types(config: Any) -> list[str]:
    """List the kind of each layer, where the config tells: full_attention, sliding_attention, linear_attention, ..."""
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if not types and config.model_type in RECURRENT_MODELS:
        types = ["recurrent"]
    return list(types or [])


def head_counts(config: Any) -> tuple[int, int]:
    """Return the numbers of query and KV heads."""
    return config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_dims(config: Any) -> tuple[int, int]:
    """Count the channels of a head: of queries and keys, and of values, which differ in multi-head latent attention."""
    if rotary := getattr(config, "qk_rope_head_dim", None):
        return int(config.qk_nope_head_dim + rotary), int(config.v_head_dim)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return dim, dim


def has_softcap(config: Any) -> bool:
    """Say whether attention scores are capped, which few kernels can do."""
    return bool(getattr(config, "attn_logit_softcapping", None))


def is_bidirectional(config: Any) -> bool:
    """Say whether tokens see later ones too."""
    return getattr(config, "is_causal", True) is False or bool(getattr(config, "use_bidirectional_attention", False))


def seen_distances(config: Any, window: int | None) -> tuple[int, int]:
    """Say how far a token of a layer with this window, or none, sees to the left and to the right; -1: no limit."""
    if not is_bidirectional(config):
        return (-1 if window is None else window - 1), 0
    if window is None:
        return -1, -1
    # As transformers masks them: Gemma counts the token itself, others do not.
    distance = window - 1 if getattr(config, "use_bidirectional_attention", False) else window
    return distance, distance


def dropouts(config: Any) -> list[str]:
    """List fields such as resid_pdrop that are not 0, except those of heads that a causal LM does not have."""
    fields = [
        name for name in sorted(vars(config)) if "drop" in name and not name.startswith(("classifier", "summary"))
    ]
    return [f"{name}={value}" for name in fields if (value := getattr(config, name))]


def logits_scale_and_cap(config: Any) -> tuple[float, float]:
    """Return what the logits are multiplied by, and the cap of their tanh after it; a cap of 0 means none."""
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return scale, getattr(config, "final_logit_softcapping", None) or 0.0


def window(config: Any) -> int | None:
    """Return how many tokens a windowed layer sees, itself among them; None if no layer has a window."""
    if not getattr(config, "use_sliding_window", True):
        return None
    return getattr(config, "sliding_window", None)


def num_windowed_layers(config: Any) -> int:
    """Count the layers that see no further than `window`."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return kinds.count("sliding_attention") if window(config) else 0


def experts(config: Any) -> tuple[int, int]:
    """Count the experts that a token is sent to, and all; 1 and 1 without experts."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    num_experts = next((n for name in names if (n := getattr(config, name, None))), 1)
    return getattr(config, "num_experts_per_tok", None) or 1, num_experts


def intermediate_size(config: Any) -> int:
    """Return the channels of the MLP that a token meets, of all its experts together."""
    per_token, num_experts = experts(config)
    width = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    return per_token * int(getattr(config, "moe_intermediate_size", None) or width) if num_experts > 1 else width


def routes(config: Any) -> bool:
    """Say whether the balancing loss of experts is asked for."""
    return bool(getattr(config, "output_router_logits", False))
