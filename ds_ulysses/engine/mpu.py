"""What DeepSpeed asks about parallelism, with the names that it asks by."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ds_ulysses.comm import Topology


class DeepSpeedMpu:
    """The answers to what DeepSpeed asks, for one topology.

    ZeRO partitions over "sequence data" parallel ranks, which are all of them. There is deliberately no
    get_data_parallel_group: where it exists, ZeRO-3 partitions over it and leaves the sequence ranks out.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def initialize_sequence_parallel(self) -> None:
        """Do nothing: DeepSpeed only looks whether this exists, to know that sequence parallelism is on."""

    def get_sequence_parallel_group(self) -> ProcessGroup:
        """Return the group of the ranks that share this rank's sequence."""
        return self.topology.sp_group

    def get_sequence_parallel_rank(self) -> int:
        """Return the rank's place in its sequence-parallel group."""
        return self.topology.sp_rank

    def get_sequence_parallel_world_size(self) -> int:
        """Return the number of ranks that share a sequence."""
        return self.topology.sp_size

    def get_sequence_data_parallel_group(self) -> ProcessGroup | None:
        """Return the group of all ranks."""
        return dist.group.WORLD

    def get_sequence_data_parallel_rank(self) -> int:
        """Return the rank's place among all ranks."""
        return self.topology.rank

    def get_sequence_data_parallel_world_size(self) -> int:
        """Return the number of all ranks."""
        return self.topology.world_size

    def get_data_parallel_rank(self) -> int:
        """Return the replica that this rank is in."""
        return self.topology.dp_rank

    def get_data_parallel_world_size(self) -> int:
        """Return the number of replicas."""
        return self.topology.dp_size

    def get_model_parallel_group(self) -> ProcessGroup:
        """Return the group of this rank alone, and never None.

        DeepSpeed without ZeRO would sum the gradient norm over it, and None means all ranks.
        """
        return self.topology.self_group

    def get_model_parallel_rank(self) -> int:
        """Return 0, as there is no model parallelism."""
        return 0

    def get_model_parallel_world_size(self) -> int:
        """Return 1, as there is no model parallelism."""
        return 1

    def get_tensor_model_parallel_world_size(self) -> int:
        """Return 1: ZeRO 1 and 2 ask when they read a universal checkpoint."""
        return 1


def mpu_of(topology: Topology) -> DeepSpeedMpu | None:
    """Return what `deepspeed.initialize` takes as `mpu`: none where no sequence is shared."""
    return DeepSpeedMpu(topology) if topology.sp_size > 1 else None
