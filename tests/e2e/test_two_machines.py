"""Two machines, as two network namespaces joined by a cable: what crosses it is what the plan says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def machines() -> Iterator[list[tuple[str, str]]]:
    """(namespace, interface) of both."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"dsu{os.getpid()}{side}" for side in "ab"]
    places = list(zip(names, [f"v{name}" for name in names], strict=True))
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            places[0][1],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            places[1][1],
            "netns",
            names[1],
        )
        for number, (name, interface) in enumerate(places, start=1):
            ip("-n", name, "addr", "add", f"10.213.7.{number}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield places
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


def run(machines: list[tuple[str, str]], store: Path, heads: tuple[int, int]) -> list[dict[str, Any]]:
    jobs = []
    for rank in range(4):
        namespace, interface = machines[rank // 2]
        command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "tests.e2e.two_machines_rank"]
        command += [str(store), str(rank), interface, *map(str, heads)]
        env = os.environ | {"GLOO_SOCKET_IFNAME": interface, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
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
@pytest.mark.parametrize("heads", [(8, 2), (8, 1)], ids=str)
def test_what_crosses_between_machines_is_what_the_plan_says(
    machines: list[tuple[str, str]], tmp_path: Path, heads: tuple[int, int]
) -> None:
    """With 8 and 1 heads both ranks of a machine need the same KV head, which still crosses once."""
    ranks = run(machines, tmp_path / "store", heads)
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
