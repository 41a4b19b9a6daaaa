"""`run_ranks`: run a function on real gloo ranks, each in a process of its own.

The processes are forked from a server that has loaded `tests.preload`, so that a run costs tenths of a second.
Each run has a wall limit, and the first traceback of a rank is shown.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOAD = ["tests.preload"]
LIMIT = 120.0
"""Seconds for one run, all ranks together."""


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, limit: float = LIMIT) -> list[Any]:
    """Call `fn(*args)` on `world_size` ranks of one gloo group; return what each returned, by rank.

    `fn` and `args` must pickle. Raises `RankFailed` with the traceback of the first rank that failed.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        pipes: list[Connection] = []
        processes = []
        for rank in range(world_size):
            parent, child = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(fn, args, rank, world_size, folder, child))
            process.start()
            child.close()
            pipes.append(parent)
            processes.append(process)
        try:
            return _collect(pipes, limit)
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()
                process.join()


def _collect(pipes: list[Connection], limit: float) -> list[Any]:
    deadline = time.monotonic() + limit
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        silent = {rank: pipe for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(silent.values()), timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            raise RankFailed(f"ranks {sorted(silent)} did not end in {limit} s")
        heard = {rank: _receive(pipe) for rank, pipe in silent.items() if pipe in ready}
        for rank, message in heard.items():
            if message is None:  # told before what its peers have to say of it
                raise RankFailed(f"rank {rank} died without a word")
        for rank, message in heard.items():
            assert message is not None
            ok, results[rank] = message
            if not ok:
                raise RankFailed(f"rank {rank} of {len(pipes)}:\n{results[rank]}")
    return [results[rank] for rank in range(len(pipes))]


def _receive(pipe: Connection) -> tuple[bool, Any] | None:
    """Whether a rank came to its end, and its result or traceback; None if it has died."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def _rank_main(fn: Callable[..., Any], args: Any, rank: int, world_size: int, folder: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_SIZE": str(world_size)}
    torch.set_num_threads(1)
    meeting, patience = f"file://{folder}/store", timedelta(seconds=60)
    try:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=patience)
        result = True, fn(*args)
    except BaseException:
        result = False, traceback.format_exc()
    pipe.send(result)
    # Peers may still be talking to this rank; leaving together keeps their last message whole.
    if result[0]:
        dist.barrier()
    os._exit(0)
