"""`train/sft.py` under torchrun, as on two machines: two agents of a rank each that meet at an address."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_sft import ROOT, free_port
from tests.training.trainer import arguments_of, inputs, log_of, sft

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def agent(node_rank: int, port: int, folder: Path, output: Path, *flags: str) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(node_rank)]
    torchrun += ["--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", str(port)]
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / f"cache_of_machine_{node_rank}"), "WANDB_MODE": "offline", "WANDB_DIR": str(folder),
    }  # fmt: skip
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    return subprocess.Popen(
        [*torchrun, str(ROOT / "train" / "sft.py"), *arguments_of(folder, output, 3, *flags)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
    )  # fmt: skip


def test_two_agents_train_like_one_rank(tmp_path: Path) -> None:
    """Each with a cache of its own; sequences are split between them, and checkpoints written by both."""
    folder, flags = inputs(tmp_path), ("--max_steps", "3", "--save_steps", "3")
    assert sft(folder, 1, tmp_path / "one", *flags) == [""]
    port = free_port()
    agents = [agent(node, port, folder, tmp_path / "two", *flags, "--report_to", "wandb") for node in (0, 1)]
    try:
        said = [job.communicate(timeout=200)[0] for job in agents]
    finally:
        for job in agents:
            job.kill()
    assert [job.returncode for job in agents] == [0, 0], said[0][-3000:] + said[1][-3000:]
    assert "2 ranks = data-parallel 1 x sequence-parallel 2" in said[0]
    one, two = log_of(tmp_path / "one"), log_of(tmp_path / "two")
    for key in ("loss", "grad_norm", "learning_rate"):
        assert [e[key] for e in two] == pytest.approx([e[key] for e in one], rel=1e-4), key
    assert all(list((folder / f"cache_of_machine_{node}").rglob("*.arrow")) for node in (0, 1))
    (kept,) = (folder / "wandb").glob("offline-run-*/*.wandb")  # what Weights & Biases would send if it were online
    assert all(json.dumps(entry["loss"]).encode() in kept.read_bytes() for entry in two)
    assert len(list((tmp_path / "two" / "checkpoint-3" / "state").glob("*optim_states.pt"))) == 2
