"""Several runs of `train/sft.py` in one start of the launcher: each rank loads everything once, and forks for each.

deepspeed --num_accelerators 2 tests/e2e/several_runs.py RUNS.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import tests.preload  # noqa: F401
import train.sft


def main(flag: str, runs: str) -> None:
    rank = os.environ["RANK"]
    for run in json.loads(Path(runs).read_text()):
        begun, child = time.monotonic(), os.fork()
        if child == 0:
            become(run, rank)
            sys.argv = ["sft.py", flag, *run["flags"]]
            train.sft.main()
            return  # and ends as any process does, as it also does by an error
        _, status = os.waitpid(child, 0)
        ended = [os.waitstatus_to_exitcode(status), time.monotonic() - begun]
        (Path(run["folder"]) / f"ended_{rank}").write_text(json.dumps(ended))


def become(run: dict[str, Any], rank: str) -> None:
    """A rank that meets its others at a port of their own, and writes what it says to a file."""
    os.environ["MASTER_PORT"] = str(run["port"])
    said = os.open(Path(run["folder"]) / f"said_{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)


if __name__ == "__main__":
    main(*sys.argv[1:])
