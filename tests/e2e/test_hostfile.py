"""`deepspeed --hostfile` from one machine to two, by pdsh over ssh, as its users start it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.namespaces import CABLE, Machine, machines
from tests.e2e.test_sft import ROOT
from tests.training.trainer import arguments_of, inputs, log_of, sft

__all__ = ["machines"]  # a fixture
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
SSH = """
IdentityFile {folder}/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""
SSHD = """
ListenAddress {address}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PidFile none
"""


@pytest.fixture
def ssh(machines: list[Machine], tmp_path: Path) -> Iterator[Path]:
    """An ssh daemon on each machine; a folder with an `ssh` that they let in."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or shutil.which("pdsh") is None:
        pytest.skip("it needs Debian's packages openssh-server and pdsh")
    folder = tmp_path / "ssh"
    folder.mkdir()
    Path("/run/sshd").mkdir(exist_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", str(folder / "key")], check=True)
    (folder / "config").write_text(SSH.format(folder=folder))
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    (folder / "ssh").chmod(0o755)
    daemons = []
    for machine in machines:
        config, said = (folder / f"{machine.address}.{kind}" for kind in ("config", "log"))
        config.write_text(SSHD.format(address=machine.address, folder=folder))
        daemons.append(subprocess.Popen(machine.command(sshd, "-D", "-f", str(config), "-E", str(said))))
    try:
        yield folder
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait()


def test_two_machines_train_like_one_rank(machines: list[Machine], ssh: Path, tmp_path: Path) -> None:
    folder, flags = inputs(tmp_path), ("--max_steps", "3", "--save_steps", "3")
    assert sft(folder, 1, tmp_path / "one", *flags) == [""]
    (folder / "hostfile").write_text("".join(f"{machine.address} slots=1\n" for machine in machines))
    (folder / ".deepspeed_env").write_text(
        f"DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\nHF_HUB_OFFLINE=1\nHF_HOME={folder}/cache\nGLOO_SOCKET_IFNAME={CABLE}\n"
    )
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--hostfile", "hostfile", str(ROOT / "train/sft.py")]
    environment = os.environ | {"PATH": f"{ssh}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu"}
    launcher += arguments_of(folder, tmp_path / "two", 3, *flags)
    job = subprocess.run(
        machines[0].command(*launcher), cwd=folder, env=environment, timeout=200, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout[-3000:]
    assert "2 ranks = data-parallel 1 x sequence-parallel 2" in job.stdout
    for machine in machines:
        assert "Accepted publickey" in (ssh / f"{machine.address}.log").read_text()
    one, two = log_of(tmp_path / "one"), log_of(tmp_path / "two")
    for key in ("loss", "grad_norm", "learning_rate"):
        assert [e[key] for e in two] == pytest.approx([e[key] for e in one], rel=1e-4), key
    assert len(list((tmp_path / "two" / "checkpoint-3" / "state").glob("*optim_states.pt"))) == 2
