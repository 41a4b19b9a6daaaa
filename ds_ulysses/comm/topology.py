"""Ranks and groups: the only file that creates process groups.

Consecutive ranks share a sequence: with sp_size 2 on 4 ranks, {0, 1} work on one batch and {2, 3} on another.
Ranks with the same place in their group are replicas of each other; dp_size = world_size / sp_size counts them.

    world      gradients and token counts are summed over it
    sp         one sequence
    ulysses    consecutive ranks of it that exchange sequence shards for head shards
    ring       ranks of it at a stride of ulysses_size, which pass keys and values on
    self       this rank alone: the model-parallel group that DeepSpeed asks for
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ds_ulysses.comm.collectives import members
from ds_ulysses.config import SequenceParallelConfig
from ds_ulysses.placement import Machine, Mesh, Placement, choose_mesh


def _join_process_group() -> None:
    """As the launcher says, on this rank's device, unless this process has joined already."""
    if not dist.is_initialized():
        if _accelerator() is not None:
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("gloo" if _accelerator() is None else None)


def _accelerator() -> torch.device | None:
    """None: the CPU, also where DeepSpeed is told so by its own variable."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return None
    return torch.accelerator.current_accelerator(check_available=True)


def _ranks_per_node(world_size: int) -> int:
    """As the launcher says: DeepSpeed's and torchrun's names."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or world_size)


@dataclass(eq=False)
class Topology:
    """The place of this rank among all, and the settings that every rank shares."""

    config: SequenceParallelConfig
    rank: int
    world_size: int
    mesh: Mesh
    sp_group: ProcessGroup = field(repr=False)
    ulysses_group: ProcessGroup = field(repr=False)
    ring_group: ProcessGroup = field(repr=False)
    self_group: ProcessGroup = field(repr=False)
    num_batches: int = 0
    """Batches that were sharded with it; the first is compared between the ranks that share it."""

    @classmethod
    def create(cls, config: SequenceParallelConfig, heads: tuple[int, int] | None = None) -> Topology:
        """Build the process groups. Collective: every rank calls it, with the same arguments.

        `heads`: query and KV heads of the model, by which `"strategy": "auto"` chooses; without them it goes by the
        number of ranks alone. Raises `ValueError` on every rank if sequence_parallel_size does not divide the world
        size, or is not the product of the sizes of its levels.
        """
        _join_process_group()
        rank, world_size, sp_size = dist.get_rank(), dist.get_world_size(), config.sequence_parallel_size
        if world_size % sp_size:
            raise ValueError(
                f'"sequence_parallel_size" is {sp_size}, but {world_size} ranks are not a multiple of it. Start a '
                f"multiple of {sp_size} ranks, or choose a divisor of {world_size}."
            )
        mesh = choose_mesh(config, Machine(_ranks_per_node(world_size), heads))
        first, u = rank - rank % sp_size, mesh.ulysses_size
        own, sp = [rank], list(range(first, first + sp_size))
        ulysses, ring = sp[(rank - first) // u * u :][:u], sp[(rank - first) % u :: u]
        groups: dict[tuple[int, ...], ProcessGroup] = {}
        for ranks in (sp, own, ulysses, ring):  # levels that are the whole group, or one rank, share its group
            if tuple(ranks) not in groups:
                groups[tuple(ranks)] = dist.new_group(ranks, use_local_synchronization=True)
        sp_group, ulysses_group, ring_group, self_group = (groups[tuple(ranks)] for ranks in (sp, ulysses, ring, own))
        topology = cls(config, rank, world_size, mesh, sp_group, ulysses_group, ring_group, self_group)
        if mesh.ring_size > 1:  # NCCL wants the first message of a group to be one that all its ranks take part in
            dist.all_reduce(torch.zeros(1, device=topology.device), group=topology.ring_group)
        return topology

    @property
    def sp_size(self) -> int:
        """The number of ranks that share a sequence."""
        return self.config.sequence_parallel_size

    @property
    def sp_rank(self) -> int:
        """The rank's place in its sequence-parallel group."""
        return self.rank % self.sp_size

    @property
    def ulysses_rank(self) -> int:
        """The rank's place at the Ulysses level."""
        return self.sp_rank % self.mesh.ulysses_size

    @property
    def ring_rank(self) -> int:
        """The rank's place at the ring level."""
        return self.sp_rank // self.mesh.ulysses_size

    @property
    def dp_size(self) -> int:
        """The number of replicas: world size / `sp_size`."""
        return self.world_size // self.sp_size

    @property
    def dp_rank(self) -> int:
        """The replica whose samples this rank works on: samplers shard by this, never by the global rank."""
        return self.rank // self.sp_size

    @property
    def device(self) -> torch.device:
        """The device on which this rank's collectives work."""
        accelerator = _accelerator()
        if accelerator is None:
            return torch.device("cpu")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())

    def place(self, num_tokens: int, num_rows: int = 1, documents: bytes | None = None) -> Placement:
        """Place the pieces of a micro-batch: rows of `num_tokens`, a multiple of sp_size; see `Placement`."""
        rows = 1 if documents is None else num_rows
        groups = self.ulysses_group.group_name, self.ring_group.group_name
        return Placement(self.mesh, self.sp_rank, num_tokens, documents, rows, *groups)

    def __deepcopy__(self, memo: dict[int, object]) -> Topology:
        """Process groups are handles: a copied model still talks over the same ones."""
        return self


def whole_group(group: ProcessGroup, num_tokens: int) -> Placement:
    """Return the placement of a Ulysses group without a topology, whose ranks hold `num_tokens` of each row."""
    rank, size = members(group)
    mesh = Mesh("ulysses", ulysses_size=size, ring_size=1, layout="contiguous")
    return Placement(mesh, rank, num_tokens * size, ulysses_group=group.group_name)
