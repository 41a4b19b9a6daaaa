"""The only file that communicates, and the ledger's pen.

What is started here comes back as a `Pending`, so that the caller can compute while it travels. Groups go by name,
because that is what an op that torch.compile does not look into can be given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]

from ds_ulysses.comm.ledger import record, waiting
from ds_ulysses.config import Direction, Entry, dtype_name

# New names of old functions, which warn where the new ones exist.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
    """Something that is on its way between ranks: `wait` returns it. What is being sent is kept alive until then."""

    def __init__(self, arriving: T, works: Sequence[Any] = (), sent: Tensor | None = None) -> None:
        self._arriving, self._works, self._sent = arriving, works, sent

    def wait(self) -> T:
        """Wait until it has arrived, and return it."""
        with waiting(self._sent):
            for work in self._works:
                work.wait()
        self._sent = None
        return self._arriving

    def then(self, change: Callable[[T], U]) -> Pending[U]:
        """Return the same, with what arrives put into another form. `change` may only make views."""
        return Pending(change(self._arriving), self._works, self._sent)


def one_ahead(pending: Iterator[Pending[T]]) -> Iterator[T]:
    """Wait for each in turn, having started the next one: it travels while the caller works on this one."""
    current = next(pending, None)
    while current is not None:
        following = next(pending, None)
        arrived, current = current.wait(), following
        yield arrived
        del arrived  # before the next but one is given memory


def start_all_to_all(
    send: Tensor, send_sizes: list[int], receive_sizes: list[int], group: str, direction: Direction
) -> Pending[Tensor]:
    """Start an all-to-all of flat buffers, sizes in elements per rank of a Ulysses group."""
    handle = _resolve_process_group(GroupName(group))
    received = send.new_empty(sum(receive_sizes))
    work = dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=handle, async_op=True)
    kept = send_sizes[dist.get_rank(handle)]
    _record("all_to_all", "ulysses", send, sum(send_sizes) - kept, direction)
    return Pending(received, [work], send)


def start_shift(send: Tensor, received: Tensor, distance: int, group: str, direction: Direction) -> Pending[Tensor]:
    """Send to the rank at `distance` up the ring while receiving from the one as far down; an empty side stays out.

    Both contiguous; `received` is written and comes back.
    """
    handle = _resolve_process_group(GroupName(group))
    rank, size = dist.get_rank(handle), dist.get_world_size(handle)
    operations = []
    if send.numel():
        operations.append(dist.P2POp(dist.isend, send, group=handle, group_peer=(rank + distance) % size))
        _record("send", "ring", send, send.numel(), direction)
    if received.numel():
        operations.append(dist.P2POp(dist.irecv, received, group=handle, group_peer=(rank - distance) % size))
    return Pending(received, dist.batch_isend_irecv(operations) if operations else [], send)


def start_all_gather(x: Tensor, group: str, direction: Direction) -> Pending[Tensor]:
    """Start gathering [n, ...] of every rank -> [ranks * n, ...]."""
    handle = _resolve_process_group(GroupName(group))
    size = dist.get_world_size(handle)
    gathered = x.new_empty(size * x.shape[0], *x.shape[1:])
    work = _all_gather(gathered, x, group=handle, async_op=True)
    _record("all_gather", "ring", x, (size - 1) * x.numel(), direction)
    return Pending(gathered, [work], x)


def start_reduce_scatter(x: Tensor, group: str, direction: Direction) -> Pending[Tensor]:
    """Start scattering [ranks * n, ...] -> [n, ...], summed over the ranks."""
    handle = _resolve_process_group(GroupName(group))
    size = dist.get_world_size(handle)
    summed = x.new_empty(x.shape[0] // size, *x.shape[1:])
    work = _reduce_scatter(summed, x, group=handle, async_op=True)
    _record("reduce_scatter", "ring", x, x.numel() - summed.numel(), direction)
    return Pending(summed, [work], x)


def same_on_all_ranks(values: Sequence[int], group: ProcessGroup, device: torch.device) -> bool:
    """Say whether all ranks of the group pass equal values, as many on each. The answer is the same on all of them."""
    own = torch.tensor(values, dtype=torch.long, device=device)
    least_and_greatest = torch.cat([own, -own])
    dist.all_reduce(least_and_greatest, op=dist.ReduceOp.MAX, group=group)
    _record("all_reduce", "sequence", least_and_greatest, least_and_greatest.numel(), "forward")
    greatest, negative_least = least_and_greatest.chunk(2)
    return bool((greatest == -negative_least).all())


def any_rank(flag: bool, device: torch.device) -> bool:
    """Say whether any rank passes a true `flag`. Collective."""
    said = torch.tensor([float(flag)], device=device)
    dist.all_reduce(said, op=dist.ReduceOp.MAX)
    return bool(said.item())


def barrier() -> None:
    """Make all ranks wait for one another."""
    dist.barrier()


def leave() -> None:
    """Leave the process group, at the end of a program."""
    dist.destroy_process_group()


def everybody() -> ProcessGroup:
    """Return the group of all ranks. Raises `ValueError` without one."""
    group = dist.group.WORLD
    if group is None:
        raise ValueError("There is no process group of all ranks yet: call ds_ulysses.init_distributed() first.")
    return group


def members(group: ProcessGroup) -> tuple[int, int]:
    """Return this rank's place in a group, and its size."""
    return dist.get_rank(group), dist.get_world_size(group)


def sum_over_world(x: Tensor) -> Tensor:
    """Sum a small tensor over all ranks. Not differentiable."""
    return torch.ops.ds_ulysses.sum_over_world(x)


@torch.library.custom_op("ds_ulysses::sum_over_world", mutates_args=())
def _sum_over_world(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    _record("all_reduce", "world", x, x.numel(), "forward")
    return total


@_sum_over_world.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _record(op: str, level: str, x: Tensor, elements_sent: int, direction: Direction) -> None:
    record(Entry(op, level, dtype_name(x.dtype), elements_sent * x.element_size(), direction))
