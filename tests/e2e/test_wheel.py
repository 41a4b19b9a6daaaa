"""The wheel by itself: one top-level name, and every command works where there is no checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.test_sft import free_port
from tests.tokenizers import tiny_checkpoint
from tests.training.trainer import log_of, write_chats

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
LAUNCHER = "from deepspeed.launcher.runner import main\nmain()\n"


class Installed(NamedTuple):
    """An environment in which the wheel is, with everything else as it is here, and an empty folder to work in."""

    wheel: Path
    bin: Path
    packages: Path
    folder: Path

    def run(self, *command: str, fails: bool = False) -> str:
        """Everything said by a command of this environment, in the empty folder."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
            "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(self.folder / "hf"),
            "TORCH_EXTENSIONS_DIR": str(self.folder / "extensions"), "PATH": f"{self.bin}:{os.environ['PATH']}",
        }  # fmt: skip
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]], cwd=self.folder, env=environment, text=True, timeout=120,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert bool(done.returncode) is fails, done.stdout[-3000:]
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel is built and installed. Other packages come from here by a .pth file, which does not carry out those
    that lie there, so that an editable install of the checkout is not seen."""
    place, folder = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("outside")
    build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(place), str(ROOT)]
    subprocess.run([*PIP, *build], check=True)
    (wheel,) = place.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place / "venv")], check=True)
    python = place / "venv" / "bin" / "python"
    subprocess.run([*PIP, "--python", str(python), "install", "-q", "--no-deps", str(wheel)], check=True)
    (packages,) = place.glob("venv/lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    launcher = python.with_name("deepspeed")
    launcher.write_text(f"#!{python}\n{LAUNCHER}")
    launcher.chmod(0o755)
    tiny_checkpoint(folder / "model", num_attention_heads=6, num_key_value_heads=3, hidden_size=48)
    write_chats(folder / "data.jsonl", 6, growth=5)
    return Installed(wheel, python.parent, packages, folder)


def test_one_name_and_all_that_belongs_to_it(installed: Installed) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    top = {name.split("/")[0] for name in names}
    (dist_info,) = top - {"ds_ulysses"}
    assert re.fullmatch(r"ds_ulysses-[\d.]+\.dist-info", dist_info)
    kept = {".py", ".pyi", ".typed", ".yaml", ".json"}
    for folder, target in (("ds_ulysses", "ds_ulysses"), ("train", "ds_ulysses/train"),
                           ("ds_configs", "ds_ulysses/ds_configs")):  # fmt: skip
        files = [path for path in (ROOT / folder).rglob("*") if path.suffix in kept or path.name == "py.typed"]
        assert files
        missing = {f"{target}/{path.relative_to(ROOT / folder)}" for path in files} - set(names)
        assert not missing
    assert f"{dist_info}/licenses/LICENSE" in names


def test_it_is_the_wheel_that_is_imported(installed: Installed) -> None:
    said = installed.run("python", "-c", "import sys, ds_ulysses; print(ds_ulysses.__file__, *sys.path, sep='\\n')")
    assert said.splitlines()[0] == str(installed.packages / "ds_ulysses" / "__init__.py")
    assert str(ROOT) not in said.splitlines()
    for name in ("train", "tests", "benchmarks"):
        assert "ModuleNotFoundError" in installed.run("python", "-c", f"import {name}", fails=True)


def test_plan(installed: Installed) -> None:
    assert "usage: ds-ulysses plan" in installed.run("ds-ulysses", "plan", "--help")
    said = installed.run("ds-ulysses", "plan", "--model", "model", "--seq", "4K", "--gpus", "2")
    assert '"sequence_parallel_size"' in said


def arguments(output: str) -> list[str]:
    """With a DeepSpeed JSON that comes with the package."""
    return [
        "--deepspeed", "ds_configs/zero2.json", "--model_name_or_path", "model", "--dataset", "data.jsonl",
        "--max_length", "60", "--output_dir", output,
    ]  # fmt: skip


def test_sft_trains(installed: Installed) -> None:
    installed.run("ds-ulysses", "sft", "--ranks", "2", *arguments("out"), "--max_steps", "2")
    assert [entry["step"] for entry in log_of(installed.folder / "out")] == [1, 2]
    assert (installed.folder / "out" / "model.safetensors").exists()


def test_the_trainer_is_a_module(installed: Installed) -> None:
    """For launchers that want one; and a recipe that comes with the package."""
    launch = ["--num_accelerators", "1", "--master_port", str(free_port()), "--module", "ds_ulysses.train.sft"]
    recipe = ["--config", "train/recipes/smollm2_python_docs.yaml", "--eval_dataset", "data.jsonl"]
    said = installed.run("deepspeed", *launch, *recipe, *arguments("out2"), "--dry_run")
    assert re.search(r'deepspeed +\{.*"stage": 2', said)
    assert not (installed.folder / "out2").exists()
