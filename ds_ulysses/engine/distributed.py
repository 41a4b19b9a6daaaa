"""Joining the process group, by DeepSpeed's own start."""

from __future__ import annotations

import os

import deepspeed
import deepspeed.ops
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator


def init_distributed() -> int:
    """Join the process group on this rank's device if this process has not done so. Returns the number of ranks."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # Only DeepSpeed's inference all-reduce uses this op, yet start-up would compile it for minutes, and a
        # compile that was killed leaves a lock on which every later start waits for ever.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    elif not dist.is_initialized():
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    deepspeed.init_distributed(dist_backend=accelerator.communication_backend_name(), verbose=False)
    return dist.get_world_size()
