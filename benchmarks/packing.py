"""What packing and balance save, on six distributions of lengths that fine-tuning data has; arithmetic, no training.

    python -m benchmarks.packing

Llama-3-8B's cost of a document, rows of up to 131,072 tokens, one row per micro-batch, 4 replicas of 8 ranks. Beside
our order: one sample per micro-batch, and rows filled in the order in which samples arrive, each in the first row that
has room. "Busiest / mean" is how much longer a step takes than if its replicas were equally busy. The bound is what no
order of the step's documents can beat: the mean, or the longest document and what only fits beside it.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

from transformers import LlamaConfig

from ds_ulysses.config import BatchSizes
from ds_ulysses.data import (
    WINDOW,
    Batching,
    Cost,
    Document,
    Documents,
    StepOrder,
    Survey,
    cost_of,
    order_epoch,
    order_steps,
    survey_epoch,
)

ROW_TOKENS = 131_072
REPLICAS, RANKS_OF_A_REPLICA = 4, 8
NUM_SAMPLES = 8 * WINDOW
LLAMA_3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)

K = 1024
Bins = list[tuple[int, int, float]]
"""(shortest, longest, percent of the samples); within a bin, logarithms are uniform."""
LMSYS: Bins = [
    (16, K, 87.12), (K, 4 * K, 12.23), (4 * K, 8 * K, 0.52), (8 * K, 32 * K, 0.11), (32 * K, 128 * K, 0.02),
]  # fmt: skip
CHATQA2: Bins = [
    (16, K, 21.92), (K, 4 * K, 9.56), (4 * K, 8 * K, 8.95), (8 * K, 32 * K, 59.43), (32 * K, 99 * K, 0.14),
]  # fmt: skip
MAGI: Bins = [
    (2, 10, 0.2), (11, 50, 2.9), (51, 100, 5.2), (101, 200, 10.2), (201, 500, 28.2), (501, K, 24.6),
    (K, 2 * K, 15.7), (2 * K, 4 * K, 7.3), (4 * K, 8 * K, 3.0), (8 * K, 16 * K, 1.3), (16 * K, 32 * K, 0.8),
    (32 * K, 64 * K, 0.1), (64 * K, 128 * K, 0.3),
]  # fmt: skip
LONG_ALIGN: Bins = [(8 * K, 64 * K, 100.0)]
LLAMA_3: Bins = [(16, 2 * K, 99.89), (16 * K, 64 * K, 0.11)]


def of_bins(bins: Bins, drawn: random.Random) -> int:
    shortest, longest, _ = drawn.choices(bins, [percent for *_, percent in bins])[0]
    return round(math.exp(drawn.uniform(math.log(shortest), math.log(longest))))


def wikipedia(drawn: random.Random) -> int:
    return min(ROW_TOKENS, max(2, round(drawn.lognormvariate(5.95, 1.26))))


DISTRIBUTIONS: dict[str, Callable[[random.Random], int]] = {
    "LMSYS-Chat": partial(of_bins, LMSYS),
    "ChatQA2": partial(of_bins, CHATQA2),
    "Magi": partial(of_bins, MAGI),
    "LongAlign": partial(of_bins, LONG_ALIGN),
    "Wikipedia": wikipedia,
    "Llama 3 SFT": partial(of_bins, LLAMA_3),
}


def batching(cost: Cost, accumulation: int = 1) -> Batching:
    return Batching(BatchSizes(REPLICAS * accumulation, 1, accumulation), REPLICAS, cost, ROW_TOKENS, packing=True)


def first_fit(documents: Iterable[Document]) -> Iterator[Documents]:
    """Rows in the order of arrival, window by window."""
    documents = iter(documents)
    while window := list(islice(documents, WINDOW)):
        rows: list[tuple[int, Documents]] = []
        for document in window:
            found = next((i for i, (used, _) in enumerate(rows) if used + document.length <= ROW_TOKENS), len(rows))
            used, row = rows[found] if found < len(rows) else (0, [])
            rows[found : found + 1] = [(used + document.length, [*row, document])]
        yield from (row for _, row in rows)


def survey(steps: Iterable[list[Documents]], how: Batching) -> Survey:
    """Steps of rows that go to replicas as they come."""
    result = Survey(how, RANKS_OF_A_REPLICA)
    for rows in steps:
        result.add(StepOrder(0.0, [rows + [[]] * (REPLICAS - len(rows))]))
    return result


def chunks(rows: Iterable[Documents]) -> Iterator[list[Documents]]:
    rows = iter(rows)
    while step := list(islice(rows, REPLICAS)):
        yield step


def bound(order: StepOrder, cost: Cost) -> float:
    """The least that the busiest replica of a step has to do."""
    lengths = [document.length for document in order.documents]
    costs = cost.of_each(lengths)
    beside = max(0, sum(lengths) - max(lengths) - (REPLICAS - 1) * ROW_TOKENS)
    return max(sum(costs) / REPLICAS, max(costs) + cost.linear * beside)


def planning_time(documents: Documents, cost: Cost) -> float:
    """Milliseconds to order 4,096 samples as one step, from their lengths to its micro-batches; median of 9."""
    window = documents[:WINDOW]
    accumulation = ours(window, batching(cost)).num_micro_steps
    how = batching(cost, accumulation)

    def seconds() -> float:
        begun = time.perf_counter()
        order = next(order_steps(lambda epoch, seed: window, len(window), how))
        taken = time.perf_counter() - begun
        assert len(order.documents) == len(window)
        return taken

    return statistics.median(seconds() for _ in range(9)) * 1000


def ours(documents: Documents, how: Batching) -> Survey:
    return survey_epoch(lambda epoch, seed: documents, len(documents), how, RANKS_OF_A_REPLICA)


def least_cost(documents: Documents, how: Batching) -> float:
    """The bounds of an epoch's steps, added up."""
    orders = order_epoch(lambda epoch, seed: documents, len(documents), how)
    return sum(bound(order, how.cost) for order in orders)


def row(name: str, cost: Cost) -> str:
    drawn = random.Random(0)
    lengths = [DISTRIBUTIONS[name](drawn) for _ in range(NUM_SAMPLES)]
    documents = [Document(i, length, length) for i, length in enumerate(lengths)]
    how = batching(cost)
    single, in_order = survey(chunks([[d] for d in documents]), how), survey(chunks(first_fit(documents)), how)
    planned = ours(documents, how)
    least = least_cost(documents, how)
    beneath = least / planned.mean_cost
    cells = (
        name,
        f"{statistics.mean(lengths):,.0f}",
        f"{single.num_micro_steps:,} / {in_order.num_micro_steps:,} / {planned.num_micro_steps:,}",
        f"{filled(in_order):.0%} / {filled(planned):.0%}",
        f"{single.padding:.2%} / {1 - planned.real_tokens / planned.padded_tokens:.0%} / {planned.padding:.2%}",
        f"{single.imbalance:.2f} / {in_order.imbalance:.3f} / {planned.imbalance:.3f} / {beneath:.3f}",
        f"{planned.max_cost / least:.3f}",
        f"{planned.max_cost / single.max_cost:.2f} / {planned.max_cost / in_order.max_cost:.2f}",
        f"{planning_time(documents, cost):.0f}",
    )
    return f"| {' | '.join(cells)} |"


def filled(result: Survey) -> float:
    return result.real_tokens / (result.num_micro_steps * REPLICAS * ROW_TOKENS)


COLUMNS = (
    "lengths like",
    "mean tokens",
    "micro-batches: single / in order / ours",
    "rows filled: in order / ours",
    "padding: single / padded rows / ours",
    "busiest / mean: single / in order / ours / bound",
    "ours / bound",
    "time of ours: / single, / in order",
    "planning of 4,096, ms",
)


def main() -> None:
    cost = cost_of(LLAMA_3_8B)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name in DISTRIBUTIONS:
        print(row(name, cost), flush=True)


if __name__ == "__main__":
    main()
