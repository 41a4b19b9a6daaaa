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
from datetime import timedelta

import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed import ProcessGroup

from ds_ulysses.config import SequenceParallelConfig
from ds_ulysses.mesh import Machine, Mesh, choose_mesh


def init_distributed() -> None:
    """Join the process group if this process has not done so, on this rank's device."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # Only DeepSpeed's inference all-reduce uses this op, yet start-up would compile it for minutes, and a
        # compile that was killed leaves a lock on which every later start waits for ever.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    elif not dist.is_initialized():
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    deepspeed.init_distributed(dist_backend=accelerator.communication_backend_name(), verbose=False)


def patient_group(limit: timedelta) -> ProcessGroup:
    """All ranks, on the CPU: to wait longer than a collective of training may take. Collective."""
    return dist.new_group(backend="gloo", timeout=limit)


def _ranks_per_node(world_size: int) -> int:
    """As the launcher says: DeepSpeed's and torchrun's names."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or world_size)


@dataclass(eq=False)
class Topology:
    """Where this rank stands, and the settings that every rank shares."""

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
        """Build the groups. Collective: every rank calls it, with the same arguments.

        `heads`: query and KV heads of the model, by which `"strategy": "auto"` chooses; without them it goes by the
        number of ranks alone. Raises `ValueError` on every rank if sequence_parallel_size does not divide the world
        size, or is not the product of the sizes of its levels.
        """
        init_distributed()
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
        return self.config.sequence_parallel_size

    @property
    def sp_rank(self) -> int:
        """Place in the group."""
        return self.rank % self.sp_size

    @property
    def ulysses_rank(self) -> int:
        return self.sp_rank % self.mesh.ulysses_size

    @property
    def ring_rank(self) -> int:
        return self.sp_rank // self.mesh.ulysses_size

    @property
    def dp_size(self) -> int:
        return self.world_size // self.sp_size

    @property
    def dp_rank(self) -> int:
        """Which samples this rank works on: samplers shard by this, never by the global rank."""
        return self.rank // self.sp_size

    @property
    def device(self) -> torch.device:
        return torch.device(get_accelerator().current_device_name())

    @property
    def mpu(self) -> DeepSpeedMpu:
        return DeepSpeedMpu(self)

    def __deepcopy__(self, memo: dict[int, object]) -> Topology:
        """Process groups are handles: a copied model still talks over the same ones."""
        return self


class DeepSpeedMpu:
    """What DeepSpeed asks about parallelism, with the names that it asks by.

    ZeRO partitions over "sequence data" parallel ranks, which are all of them. There is deliberately no
    get_data_parallel_group: where it exists, ZeRO-3 partitions over it and leaves the sequence ranks out.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def initialize_sequence_parallel(self) -> None:
        """DeepSpeed only looks whether this exists, to know that sequence parallelism is on."""

    def get_sequence_parallel_group(self) -> ProcessGroup:
        return self.topology.sp_group

    def get_sequence_parallel_rank(self) -> int:
        return self.topology.sp_rank

    def get_sequence_parallel_world_size(self) -> int:
        return self.topology.sp_size

    def get_sequence_data_parallel_group(self) -> ProcessGroup | None:
        return dist.group.WORLD

    def get_sequence_data_parallel_rank(self) -> int:
        return self.topology.rank

    def get_sequence_data_parallel_world_size(self) -> int:
        return self.topology.world_size

    def get_data_parallel_rank(self) -> int:
        return self.topology.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self.topology.dp_size

    def get_model_parallel_group(self) -> ProcessGroup:
        """Never None: DeepSpeed without ZeRO would sum the gradient norm over it, and None means all ranks."""
        return self.topology.self_group

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_tensor_model_parallel_world_size(self) -> int:
        """What ZeRO 1 and 2 ask when they read a universal checkpoint."""
        return 1
