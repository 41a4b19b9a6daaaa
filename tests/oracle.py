"""What the product is compared with. Shares no code with it: plain torch and plain transformers, fp64, one process."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

IGNORE = -100


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention written out. q [B, L, H, D], k and v [B, M, K, D]; `seen` broadcasts to [B, 1, L, M].

    `sinks` [H]: one more logit in each softmax, without a value.
    """
    groups = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    probabilities = scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[2]]
    return (probabilities @ v).transpose(1, 2)


def full(length: int) -> Tensor:
    """[1, 1, L, L]: every token sees every other."""
    return torch.ones(1, 1, length, length, dtype=torch.bool)


def causal(length: int, window: int | None = None) -> Tensor:
    """[1, 1, L, L]: token i sees i, i - 1, ... and, with a window, `window` tokens in all."""
    i, j = torch.arange(length)[:, None], torch.arange(length)
    return ((j <= i) & (j > i - (window or length + 1)))[None, None]


def within_documents(seen: Tensor, batch: int, length: int, documents: list[tuple[int, int, int]]) -> Tensor:
    """Restrict `seen` to pairs of one document; tokens in none see nothing."""
    owner = torch.full((batch, length), -1)
    for index, (row, start, stop) in enumerate(documents):
        owner[row, start:stop] = index
    same = (owner[:, :, None] == owner[:, None, :]) & (owner >= 0)[:, :, None]
    return seen & same[:, None]


@dataclass
class Sample:
    """One document: its tokens and its labels, unpadded and unsharded."""

    ids: Tensor
    labels: Tensor

    @property
    def num_targets(self) -> int:
        """Labels that some token predicts; the first label has none before it."""
        return int((self.labels[1:] != IGNORE).sum())


def exact_copy(model: nn.Module) -> Any:
    """The model in fp64 with eager attention."""
    model = copy.deepcopy(model).double().train()
    part: Any
    for part in model.modules():  # PEFT and outer modules hold the model that knows about attention
        if hasattr(part, "set_attn_implementation"):
            part.set_attn_implementation("eager")
            if part._can_set_experts_implementation():
                part.set_experts_implementation("eager")
    return model


def train_step(model: nn.Module, *micro_batches: list[Sample]) -> tuple[float, dict[str, Tensor]]:
    """Token-mean loss over all samples and the gradient of every parameter, each sample run alone.

    The balancing loss of experts is that of all tokens of a micro-batch, and weighs as much as its targets do.
    """
    model = exact_copy(model)
    count = sum(sample.num_targets for samples in micro_batches for sample in samples)
    total = torch.zeros((), dtype=torch.double)
    for samples in micro_batches:
        outputs = [model(input_ids=s.ids[None], use_cache=False) for s in samples]
        for sample, output in zip(samples, outputs, strict=True):
            total = total + cross_entropy(output.logits[0, :-1], sample.labels[1:], reduction="sum") / max(count, 1)
        if getattr(outputs[0], "router_logits", None):
            weight = sum(sample.num_targets for sample in samples) / max(count, 1)
            total = total + weight * balancing_loss(model, outputs)
    total.backward()
    grads = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    return total.item(), grads


def balancing_loss(model: Any, outputs: list[Any]) -> Tensor:
    """As transformers computes it, of all samples together."""
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    logits = tuple(torch.cat(layer) for layer in zip(*(output.router_logits for output in outputs), strict=True))
    return model.router_aux_loss_coef * function(logits, model.num_experts, model.num_experts_per_tok)
