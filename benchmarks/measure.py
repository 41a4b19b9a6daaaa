"""Instruments that the benchmarks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import profile


def peak_memory(step: Callable[[], object]) -> int:
    """Most bytes that a step holds above what was there before it, from every allocation and release in their order.

    The least of three steps: when a message lets go of its buffer is a matter of chance.
    """
    step()
    return min(_peak(step) for _ in range(3))


def _peak(step: Callable[[], object]) -> int:
    with profile(profile_memory=True, record_shapes=True) as profiled:
        step()
    tree = profiled.profiler.kineto_results.experimental_event_tree()
    return max(accumulate(size for _, size in sorted(_allocations(tree))), default=0)


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """(time, bytes) of each allocation, negative for a release."""
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _allocations(event.children)
