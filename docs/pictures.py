"""Draws the pictures of the README and of docs/how_it_works.md from the layouts and schedules that training uses.

python docs/pictures.py          # writes docs/pictures/*.svg
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from ds_ulysses.placement import Geometry, HeadSplit, Pair, held_by, make_schedule, pack_documents, token_index

FOLDER = Path(__file__).with_name("pictures")
COLORS = ListedColormap(["#f2f2f2", "#4477aa", "#ee6677", "#228833", "#ccbb44"])
"""Nobody, then ring ranks 0 to 3."""
RANKS, TOKENS = 4, 32


def places(geometry: Geometry) -> list[Any]:
    """Of the tokens of each ring rank, in the order in which it holds them."""
    return [token_index(segments, 1)[:, 0] for segments in held_by(geometry)]


def seen(pair: Pair) -> Any:
    """[queries, keys] of a pair: what its mask leaves, aligned at the bottom right as flash-attn does."""
    num_q, num_k = pair.q_stop - pair.q_start, pair.k_stop - pair.k_start
    distance = torch.arange(num_k)[None] - torch.arange(num_q)[:, None] - (num_k - num_q)
    right = distance <= pair.right if pair.right >= 0 else torch.ones_like(distance, dtype=torch.bool)
    left = -distance <= pair.left if pair.left >= 0 else torch.ones_like(distance, dtype=torch.bool)
    return (right & left).numpy()


def work(geometry: Geometry, distance: int | None = None) -> Any:
    """[query, key]: 1 + the ring rank that computes it, at one distance or at all; 0 if nobody does."""
    held, who = places(geometry), np.zeros((TOKENS, TOKENS), dtype=int)
    for rank in range(geometry.ring_size):
        for step in make_schedule(geometry, rank):
            if distance is not None and step.distance != distance:
                continue
            source = (rank - step.distance) % geometry.ring_size
            sent = next(s.send for s in make_schedule(geometry, source) if s.distance == step.distance)
            pieces = [held[source][piece.start : piece.stop] for part in sent for piece in part]
            block = np.concatenate([held[source][:0], *pieces])
            for pair in step.pairs:
                queries, keys = held[rank][pair.q_start : pair.q_stop], block[pair.k_start : pair.k_stop]
                who[np.ix_(queries, keys)] += (rank + 1) * seen(pair)
    return who


def draw(axes: Any, matrix: Any, title: str) -> None:
    axes.imshow(matrix, cmap=COLORS, vmin=0, vmax=RANKS, aspect="auto", interpolation="nearest")
    axes.set_title(title, fontsize="small")
    axes.set_xticks([])
    axes.set_yticks([])


def strategies() -> Figure:
    """Whose tokens and heads are whose on 4 ranks: outside of attention, and inside of it by the strategy."""
    figure = Figure(figsize=(9, 2.5), layout="constrained")
    panels = figure.subplots(1, 4, width_ratios=(9, 9, 9, 11))
    split = HeadSplit(9, 3, RANKS)
    draw(
        panels[0],
        np.repeat(np.arange(RANKS) + 1, TOKENS // RANKS)[:, None] * np.ones((1, 9), int),
        "outside of attention: its tokens",
    )
    draw(panels[1], owners_of_heads(split)[None] * np.ones((TOKENS, 1), int) + 1, "Ulysses: all tokens of its heads")
    rings, pair = np.zeros(TOKENS, int), owners_of_heads(HeadSplit(9, 3, 2))
    for ring_rank, held in enumerate(places(Geometry(TOKENS, 2, "zigzag"))):
        rings[held] = ring_rank
    draw(panels[2], 2 * rings[:, None] + pair[None] + 1, "hierarchical 2 x 2: some of both")
    draw(panels[3], work(Geometry(TOKENS, RANKS, "zigzag")), "ring: its queries, all keys come by")
    for axes, label in zip(panels, ("channels", "heads", "heads", "keys"), strict=True):
        axes.set_xlabel(label, fontsize="small")
        axes.set_ylabel("queries" if label == "keys" else "tokens", fontsize="small")
    return figure


def owners_of_heads(split: HeadSplit) -> Any:
    """[head]: the rank that attends with it."""
    return np.concatenate([np.repeat(r, np.subtract(*split.q_range(r)[::-1])) for r in range(split.sp_size)])


def layouts() -> Figure:
    """Who holds which token: one document, and two of 20 and 12 tokens."""
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    panels = figure.subplots(4, 1)
    packed = pack_documents([(0, 0, 20), (0, 20, TOKENS)])
    for axes, (layout, documents) in zip(
        panels, [(name, d) for name in ("contiguous", "zigzag") for d in (None, packed)], strict=True
    ):
        owner = np.zeros((1, TOKENS), dtype=int)
        for rank, held in enumerate(places(Geometry(TOKENS, RANKS, layout, right=0, documents=documents))):
            owner[0, held] = rank + 1
        draw(axes, owner, f"{layout}, {'documents of 20 and 12 tokens' if documents else 'one document'}")
    return figure


def ring() -> Figure:
    """Who computes which scores under a causal mask, altogether and at each step of the ring."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    panels = figure.subplots(2, RANKS + 1)
    for row, layout in zip(panels, ("contiguous", "zigzag"), strict=True):
        geometry = Geometry(TOKENS, RANKS, layout)
        whole = work(geometry)
        share = [(whole == rank + 1).sum() for rank in range(RANKS)]
        draw(row[0], whole, f"{layout}: busiest {max(share) / np.mean(share):.2f}x")
        for distance, axes in enumerate(row[1:]):
            draw(axes, work(geometry, distance), f"step {distance}")
    return figure


def exchange() -> Figure:
    """9 query heads and 3 KV heads on 2 ranks, before and after the all-to-all."""
    split, figure = HeadSplit(9, 3, 2), Figure(figsize=(8, 2.6), layout="constrained")
    panels = figure.subplots(1, 3, width_ratios=(9, 9, 3))
    tokens = np.repeat([[1], [2]], 8, axis=0)
    draw(panels[0], np.repeat(tokens, 9, axis=1), "before: each rank has its tokens of 9 heads")
    heads = np.zeros((16, 9), dtype=int)
    for rank in range(2):
        heads[:, slice(*split.q_range(rank))] = rank + 1
    draw(panels[1], heads, "after: all tokens of its heads, 5 and 4")
    keys = np.zeros((16, 3), dtype=int)
    for rank in range(2):
        keys[:, slice(*split.kv_range(rank))] += rank + 1
    draw(panels[2], keys, "KV; green: both")
    panels[0].set_ylabel("tokens", fontsize="small")
    for axes in panels:
        axes.set_xlabel("heads", fontsize="small")
    return figure


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    matplotlib.rcParams["svg.hashsalt"] = "ds_ulysses"  # the same file every time
    for picture in (strategies, layouts, ring, exchange):
        picture().savefig(FOLDER / f"{picture.__name__}.svg", metadata={"Date": None})
