"""Two machines on one: network namespaces that a cable joins."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import pytest

CABLE = "cable"
"""The interface at both ends."""


class Machine(NamedTuple):
    namespace: str
    address: str

    def command(self, *words: str) -> list[str]:
        """That runs it there."""
        return ["ip", "netns", "exec", self.namespace, *words]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    both = [Machine(f"dsu{os.getpid()}{side}", f"10.213.7.{side}") for side in (1, 2)]
    try:
        for machine in both:
            ip("netns", "add", machine.namespace)
        first, second = (machine.namespace for machine in both)
        ip("link", "add", CABLE, "netns", first, "type", "veth", "peer", "name", CABLE, "netns", second)
        for machine in both:
            ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", CABLE)
            ip("-n", machine.namespace, "link", "set", CABLE, "up")
            ip("-n", machine.namespace, "link", "set", "lo", "up")
        yield both
    finally:
        for machine in both:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", machine.namespace)
