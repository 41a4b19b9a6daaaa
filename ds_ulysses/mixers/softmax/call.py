"""What one kind of attention layer does on one placement: worked out once a batch, whatever the number of layers.

Layers of one model differ in few things: heads, window, scale. They name these in a string, since an op that
torch.compile does not look into takes tensors, numbers and strings (and the placement, see there).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple, get_type_hints

from ds_ulysses.comm import ChannelTable
from ds_ulysses.kernels import KERNELS, Kernel, Mask
from ds_ulysses.mixers.softmax.kernel_calls import KernelCall, Rows, kernel_calls, spans_of
from ds_ulysses.placement import (
    HeadGroup,
    HeadRun,
    HeadSplit,
    Placement,
    Range,
    Step,
    gathered_pairs,
    make_schedule,
    split_heads,
    stages,
)


class Settings(NamedTuple):
    """The settings of an attention layer. Head counts are those of the model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of queries and keys."""
    value_dim: int
    """Of values and the output."""
    scale: float
    left: int
    right: int
    softcap: float
    kernel_name: str

    @property
    def kv_dim(self) -> int:
        """The channels of a KV head, key and value side by side."""
        return self.head_dim + self.value_dim

    def encode(self) -> str:
        """Write the settings as a string."""
        return ";".join(map(str, self))


@lru_cache(maxsize=256)
def decode(text: str) -> Settings:
    """Return the settings that `Settings.encode` wrote."""
    kinds = get_type_hints(Settings).values()
    return Settings._make(kind(value) for kind, value in zip(kinds, text.split(";"), strict=True))


class Exchange(NamedTuple):
    """The channels that each rank of a Ulysses group attends with."""

    qkv: ChannelTable
    q: ChannelTable
    kv: ChannelTable
    out: ChannelTable


@lru_cache(maxsize=64)
def exchange_of(split: HeadSplit, head_dim: int, value_dim: int) -> Exchange:
    """Return the exchange of heads of these dims: of queries and keys, and of values and the output."""
    q, keys, values = split.q_channels(head_dim), split.kv_channels(head_dim), split.kv_channels(value_dim)
    tables = map(ChannelTable, ([q, keys, values], [q], [keys, values], [split.q_channels(value_dim)]))
    return Exchange(*tables)


def local_heads(placement: Placement, settings: Settings) -> tuple[int, int]:
    """Count the query and KV heads of this rank."""
    split = split_heads(settings.num_heads, settings.num_kv_heads, placement.ulysses_size)
    return split.counts(placement.ulysses_rank)


def call_of(placement: Placement, settings: str) -> Call:
    """Return the one `Call` of layers with these settings."""
    return placement.derived(settings, lambda: Call(decode(settings), placement))


class Stage(NamedTuple):
    """The KV heads that all_gather attention gathers at a time."""

    kv_heads: Range
    calls: tuple[KernelCall, ...]


class GroupTables(NamedTuple):
    """The channels that each rank gets with a head group."""

    qkv: ChannelTable
    out: ChannelTable


class Call:
    """The work of layers: who attends with which heads to what, in which order."""

    def __init__(self, settings: Settings, placement: Placement) -> None:
        self.settings = settings
        # The placement keeps its calls: one that kept it alive in turn would outlive its batch.
        self.placement: Placement = weakref.proxy(placement)
        self.split: HeadSplit = split_heads(settings.num_heads, settings.num_kv_heads, placement.ulysses_size)
        self.dims = settings.head_dim, settings.value_dim
        self.exchange = exchange_of(self.split, *self.dims)
        self.kernel: Kernel = KERNELS[settings.kernel_name]
        self.local_heads = local_heads(placement, settings)
        self.spreads_keys = placement.ring_size > 1 and self.split.shares_kv_heads
        """Whether several ranks of the Ulysses group need the same KV head and there is a ring.

        Keys then cross the ring as sequence shards, once, and are spread over the group on arrival.
        """
        parts = placement.ulysses_size if self.spreads_keys else 1
        self.geometry = placement.geometry(settings.left, settings.right, parts)

    @cached_property
    def steps(self) -> tuple[tuple[Step, tuple[KernelCall, ...]], ...]:
        """The steps of the ring: what travels at each, and what is computed of it."""
        schedule = make_schedule(self.geometry, self.placement.ring_rank)
        rows = Rows(self.placement.packed, joined=True, may_cross=True)
        return tuple(
            (step, kernel_calls(spans_of(step.pairs, rows), self._runs, self._mask, rows)) for step in schedule
        )

    @cached_property
    def local_calls(self) -> tuple[KernelCall, ...]:
        """The kernel calls of Ulysses: this rank's heads over the whole sequence."""
        return self._gathered([self._runs], may_cross=False)[0]

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of all_gather: query heads by their place among all, KV heads by that in the stage."""
        size, parts = self.split.queries_per_kv, stages(self.settings.num_kv_heads)
        runs = [[HeadRun(start * size, stop * size, 0, stop - start)] for start, stop in parts]
        return tuple(map(Stage, parts, self._gathered(runs, may_cross=True)))

    @cached_property
    def head_groups(self) -> tuple[HeadGroup, ...]:
        """The head groups of this rank, where Ulysses works in head groups."""
        return tuple(self.split.groups(self.placement.ulysses_rank, self.placement.head_groups))

    @cached_property
    def group_calls(self) -> tuple[tuple[tuple[int, KernelCall], ...], ...]:
        """The kernel calls of each head group, each with the index of the group that brought its keys."""
        owned = [(owner, [run]) for group in self.head_groups for owner, run in group.runs]
        calls = iter(self._gathered([run for _, run in owned], may_cross=False))
        return tuple(
            tuple((owner, call) for owner, _ in group.runs for call in next(calls)) for group in self.head_groups
        )

    @cached_property
    def group_tables(self) -> tuple[GroupTables, ...]:
        """The tables of each head group: what of q, k and v, and of the output, each rank gets with it."""
        count, size = self.placement.head_groups, self.placement.ulysses_size
        tables = []
        for groups in zip(*(self.split.groups(rank, count) for rank in range(size)), strict=True):
            q, kv = [group.q_range for group in groups], [group.kv_range for group in groups]
            key_channels, value_channels = (_times(kv, dim) for dim in self.dims)
            qkv = ChannelTable([_times(q, self.settings.head_dim), key_channels, value_channels])
            tables.append(GroupTables(qkv, ChannelTable([_times(q, self.settings.value_dim)])))
        return tuple(tables)

    @cached_property
    def _runs(self) -> list[HeadRun]:
        return self.split.runs(self.placement.ulysses_rank)

    @property
    def _mask(self) -> Mask:
        return Mask(self.settings.scale, softcap=self.settings.softcap)

    def _gathered(self, runs: Sequence[Sequence[HeadRun]], may_cross: bool) -> list[tuple[KernelCall, ...]]:
        """This ring rank's queries with the keys of all, for each of several lists of head runs."""
        rows = Rows(self.placement.packed, joined=False, may_cross=may_cross)
        spans = spans_of(gathered_pairs(self.geometry, self.placement.ring_rank), rows)
        return [kernel_calls(spans, some, self._mask, rows) for some in runs]


def _times(ranges: Sequence[Range], dim: int) -> list[Range]:
    """Of heads -> of channels."""
    return [(start * dim, stop * dim) for start, stop in ranges]
