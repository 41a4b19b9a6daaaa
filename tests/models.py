"""Tiny random models of real architectures, and batches for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.oracle import IGNORE, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB = 64


MIXED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
ROUTED = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {
        **MIXED, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 0.5, "query_pre_attn_scalar": 4,
    },
    "gemma3_text": MIXED,
    "phi3": {"sliding_window": 4, "pad_token_id": 0},
    "olmo2": {},
    "olmo3": MIXED,
    "glm4": {"pad_token_id": 0},
    "smollm3": {"pad_token_id": 0, "no_rope_layers": [1, 0]},
    "starcoder2": {"sliding_window": 4},
    "exaone4": MIXED,
    "granite": {
        "logits_scaling": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.7, "embedding_multiplier": 2.0,
    },
    "cohere": {"logit_scale": 0.5, "eos_token_id": 1, "use_qk_norm": True},
    "cohere2": {**MIXED, "logit_scale": 0.5, "eos_token_id": 1},
    "gpt2": {
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "scale_attn_by_inverse_layer_idx": True,
        "bos_token_id": 1, "eos_token_id": 1,
    },
    "gpt_neox": {},
    "mixtral": {**ROUTED, "num_local_experts": 4, "sliding_window": 4},
    "qwen2_moe": {**ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**ROUTED, "num_experts": 4},
    "olmoe": {**ROUTED, "num_experts": 4, "eos_token_id": 1},
    "gpt_oss": {
        **ROUTED, **MIXED, "num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "deepseek_v3": {
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "head_dim": 4, "v_head_dim": 6, "kv_lora_rank": 16,
        "q_lora_rank": 16, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    },
    "glm4_moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "use_qk_norm": True,
    },
}  # fmt: skip
"""Tested model types, with what makes a tiny one show its peculiarities."""

SHARPENED = ("q_proj", "k_proj", "qkv_proj", "c_attn", "query_key_value", "_b_proj", "kv_a_proj", "gate.", "router.")
"""Parts of the names of weights that are scaled up, so that a wrong mask, RoPE or expert shows."""


def tiny_model(kind: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """2 layers, 4 query and 2 KV heads of 8; see `SHARPENED`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(settings | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.copy_(torch.linspace(-2, 2, len(parameter)))
            elif "norm" in name or "bias" in name:  # ones and zeros would hide what is skipped
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif any(part in name for part in SHARPENED):
                parameter.mul_(5)
    return model.train()


def random_samples(lengths: list[int], seed: int = 1, prompt: float = 0.3) -> list[Sample]:
    """Documents of these lengths; about the first `prompt` of each is not supervised."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in lengths:
        ids = torch.randint(1, VOCAB, (length,), generator=generator)
        labels = ids.clone()
        labels[: int(length * prompt)] = IGNORE
        samples.append(Sample(ids, labels))
    return samples


def collate(samples: list[Sample], side: str = "right") -> dict[str, Tensor]:
    """One padded batch, with an attention mask where any row is padded."""
    longest = max(len(sample.ids) for sample in samples)

    def filled(x: Tensor, value: int) -> Tensor:
        rest = x.new_full((longest - len(x),), value)
        return torch.cat([x, rest] if side == "right" else [rest, x])

    batch = {
        "input_ids": torch.stack([filled(s.ids, 0) for s in samples]),
        "labels": torch.stack([filled(s.labels, IGNORE) for s in samples]),
    }
    if any(len(sample.ids) < longest for sample in samples):
        batch["attention_mask"] = torch.stack([filled(torch.ones_like(s.ids), 0) for s in samples])
    return batch


def pack(samples: list[Sample]) -> dict[str, Tensor]:
    """One row of documents, one after another, told apart by their positions."""
    return {
        "input_ids": torch.cat([s.ids for s in samples])[None],
        "labels": torch.cat([s.labels for s in samples])[None],
        "position_ids": torch.cat([torch.arange(len(s.ids)) for s in samples])[None],
    }
