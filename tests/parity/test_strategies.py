"""Every strategy, layout, head count, mask and kind of document, exact to 1e-10 and counted to the byte."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.parity.attention import Case, Way, check
from tests.quick import slow

TOKENS = 12
"""Of a rank: zigzag chunks of 6."""
HEADS = {"MHA": (4, 4), "G2": (4, 2), "G4": (8, 2), "G7": (7, 1), "MQA": (4, 1), "uneven": (9, 3), "odd": (5, 5)}
Documents = tuple[tuple[int, int, int], ...]


def ways(world: int) -> list[Way]:
    """All strategies, with all layouts and sizes of their levels."""
    found = [Way("ulysses", ulysses_head_groups=groups) for groups in (2, 3)] if world > 1 else []
    for layout in ("contiguous", "zigzag"):
        found += [Way("ring", layout=layout), Way("all_gather", layout=layout)]
        found += [Way("hierarchical", u, layout) for u in range(2, world) if world % u == 0]
    return found


def in_a_row(row: int, lengths: list[int]) -> Documents:
    return tuple((row, a, b) for a, b in pairwise(accumulate(lengths, initial=0)))


def documents(world: int) -> dict[str, Documents]:
    """By what is hard about them, for two rows."""
    tokens = TOKENS * world
    short = [1, 2 * world - 1, 1, 3, world + 1]
    cut = [tokens // 2 + 1, tokens - tokens // 2 - 1]
    return {
        "short and long": in_a_row(0, [*short, tokens - sum(short)]) + in_a_row(1, [tokens]),
        "borders inside chunks": (*in_a_row(0, cut), (1, 2, tokens - 3)),
        "ranks with nothing": ((0, 0, 5), (1, tokens - 2, tokens)),
    }


def grid(world: int, way: Way) -> list[Case]:
    chunk, tokens = TOKENS // 2, TOKENS * world
    windows = (None, 1, chunk - 1, chunk, chunk + 1, tokens)
    cases = [Case(heads, 1, TOKENS, 4, way=way) for heads in HEADS.values()]
    cases += [replace(case, right=-1) for case in cases]
    cases += [Case(HEADS[name], 2, TOKENS, 4, window=w, way=way) for name in ("G2", "uneven") for w in windows]
    for name in ("MHA", "MQA"):
        for found in documents(world).values():
            cases += [Case(HEADS[name], 2, TOKENS, 4, window=w, documents=found, way=way) for w in windows]
            cases += [Case(HEADS[name], 2, TOKENS, 4, right=-1, documents=found, way=way)]
    cases += [Case(HEADS["G2"], 1, TOKENS, 4, documents=((0, 3, tokens - 1),), way=way)]
    cases += [Case(HEADS["G2"], 1, n, 4, way=way) for n in (1, 2, 3, 7)]
    for value_dim in (2, 6):  # MLA: smaller than that of keys
        wide = [Case(HEADS[name], 2, 6, 4, value_dim=value_dim, way=way) for name in ("G2", "uneven", "MQA")]
        cases += [*wide, replace(wide[0], documents=((0, 1, 6), (1, 0, 3))), replace(wide[1], sinks=True, window=3)]
        cases += [replace(wide[0], kernel="eager"), replace(wide[0], right=-1)]
    cases += [
        Case(HEADS["G4"], 2, TOKENS, 4, logits=20.0, way=way),
        Case(HEADS["G2"], 1, TOKENS, 4, scale=0.9, way=way),
    ]
    return cases


def soft(way: Way) -> list[Case]:
    """Softcap and sinks."""
    cases = [Case(HEADS[name], 2, 6, 4, sinks=True, way=way) for name in HEADS]
    cases += [
        Case(HEADS["G2"], 2, 6, 4, softcap=1.5, sinks=sinks, window=w, way=way)
        for sinks in (False, True)
        for w in (None, 3)
    ]
    cases += [Case(HEADS["MQA"], 1, 6, 4, sinks=True, window=4, documents=((0, 1, 6),), way=way)]
    return cases


PLACES = [(world, way) for world in (1, 2, 3, 4) for way in ways(world)]
PLACES += [slow(world, way) for world in (6, 8) for way in ways(world)]


def name(value: Any) -> str:
    return "-".join(str(x) for x in vars(value).values()) if isinstance(value, Way) else str(value)


@pytest.mark.parametrize(("world", "way"), PLACES, ids=name)
def test_grid(world: int, way: Way) -> None:
    run_ranks(check, world, *grid(world, way), *soft(way))
