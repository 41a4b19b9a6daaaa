"""What DeepSpeed asks about parallelism, with the names that it asks by."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ds_ulysses.comm import Topology


class DeepSpeedMpu:
    """Answers for one topology.

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


def mpu_of(topology: Topology) -> DeepSpeedMpu | None:
    """What `deepspeed.initialize` takes as `mpu`: none where no sequence is shared."""
    return DeepSpeedMpu(topology) if topology.sp_size > 1 else None
