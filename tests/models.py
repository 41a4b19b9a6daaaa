"""Tiny random models of real architectures, and batches for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.oracle import IGNORE, Sample

VOCAB = 64


ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"sliding_window": 4, "pad_token_id": 0},
    "olmo2": {},
    "olmo3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": {"pad_token_id": 0},
    "smollm3": {"pad_token_id": 0, "no_rope_layers": [1, 0]},
    "starcoder2": {"sliding_window": 4},
    "exaone4": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
}
"""Tested model types, with what makes a tiny one show its peculiarities."""


def tiny_model(kind: str = "llama", seed: int = 0, **changes: object) -> nn.Module:
    """2 layers, 4 query and 2 KV heads of 8; q and k weights scaled up so that a wrong mask or RoPE shows."""
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
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(5)
            elif "norm" in name:  # ones would hide a norm that is skipped
                parameter.add_(0.1 * torch.randn_like(parameter))
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
