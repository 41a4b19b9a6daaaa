"""Two machines, as two network namespaces joined by a cable: what crosses it is what the plan says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.namespaces import CABLE, Machine, machines

__all__ = ["machines"]  # a fixture

ROOT = Path(__file__).parents[2]
HEADS = [(8, 2), (8, 1)]


@pytest.fixture(scope="module")
def measured(machines: list[Machine], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks counts with each number of heads."""
    store, jobs = tmp_path_factory.mktemp("store") / "store", []
    for rank in range(4):
        command = machines[rank // 2].command(sys.executable, "-m", "tests.e2e.two_machines_rank")
        command += [str(store), str(rank), CABLE, *(f"{q},{kv}" for q, kv in HEADS)]
        env = os.environ | {"GLOO_SOCKET_IFNAME": CABLE, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        jobs.append(
            subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        for job in jobs:
            said, _ = job.communicate(timeout=120)
            assert job.returncode == 0, said[-3000:]
    finally:
        for job in jobs:
            job.kill()
    return [json.loads(Path(f"{store}.{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.e2e
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_what_crosses_between_machines_is_what_the_plan_says(
    measured: list[dict[str, Any]], heads: tuple[int, int]
) -> None:
    """With 8 and 1 heads both ranks of a machine need the same KV head, which still crosses once."""
    ranks = [rank["{},{}".format(*heads)] for rank in measured]
    for rank in ranks:
        assert rank["mesh"].startswith("hierarchical 2 x 2, zigzag layout (weighed bytes")
        assert rank["ledger"] == rank["predicted"]
    for pair in (ranks[:2], ranks[2:]):
        predicted = sum(rank["predicted"] for rank in pair)
        # Packet headers, acknowledgements and the barriers come on top.
        assert predicted <= pair[0]["wire"] <= 1.05 * predicted
        assert sum(rank["inside"] for rank in pair) > predicted  # and stays off the cable
    kv_head = 4096 // 2 * 64 * 4 * 2 * heads[1]
    # Each machine's keys go once, three quarters of them (zigzag, causal), and so do the other's gradients.
    assert sum(rank["predicted"] for rank in ranks) == 3 * 2 * 2 * kv_head * 3 / 4
