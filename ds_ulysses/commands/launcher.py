"""DeepSpeed's launcher, as a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path


def launch(num_ranks: int | None, *command: str) -> int:
    """Run a script, or `--module NAME`, on so many ranks of this machine, None: all; returns its exit code."""
    with socket.socket() as free:  # another run may hold the launcher's own port
        free.bind(("", 0))
        port = free.getsockname()[1]
    ranks = [] if num_ranks is None else ["--num_accelerators", str(num_ranks)]
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    return subprocess.call([launcher, "--quiet", "--no_local_rank", "--master_port", str(port), *ranks, *command])
