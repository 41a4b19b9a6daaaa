"""What the product is compared with. Shares no code with it: plain torch and plain transformers, fp64, one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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


def train_step(model: nn.Module, samples: list[Sample]) -> tuple[float, dict[str, Tensor]]:
    """Token-mean loss over all samples and the gradient of every parameter, in fp64 with eager attention."""
    model = copy.deepcopy(model).double().train()
    for part in model.modules():  # PEFT and outer modules hold the model that knows about attention
        if hasattr(part, "set_attn_implementation"):
            part.set_attn_implementation("eager")
    count = sum(sample.num_targets for sample in samples)
    total = torch.zeros((), dtype=torch.double)
    for sample in samples:
        if sample.num_targets:
            out = model(input_ids=sample.ids[None], labels=sample.labels[None], use_cache=False)
            total = total + out.loss * sample.num_targets / count
    if count:
        total.backward()
    grads = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    return total.item(), grads
