"""`train/sft.py` under the real launcher, on a tiny model and data of the test's own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.tokenizers import tiny_checkpoint
from tests.training.trainer import log_of, run_sft, write_chats

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
DEEPSPEED = Path(sys.executable).with_name("deepspeed")
SFT = str(ROOT / "train" / "sft.py")
SEVERAL = Path(__file__).with_name("several_runs.py")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny checkpoint, 10 chats of many lengths, a stale lock of DeepSpeed's compiler, and caches of our own."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny_checkpoint(folder / "model", num_attention_heads=6, num_key_value_heads=3, hidden_size=48)
    write_chats(folder / "data.jsonl", 10, growth=7)
    extensions = folder / "extensions"
    for op in ("deepspeed_shm_comm", "cpu_adam", "fused_adam"):
        (extensions / op).mkdir(parents=True)
        (extensions / op / "lock").touch()
    return {"root": str(folder), "model": str(folder / "model"), "data": str(folder / "data.jsonl")}


def flags_of(inputs: dict[str, str], config: Path, output: Path, *flags: str) -> tuple[str, ...]:
    return (
        "--model_name_or_path", inputs["model"], "--dataset", inputs["data"], "--deepspeed", str(config),
        "--output_dir", str(output), "--max_length", "60", *flags,
    )  # fmt: skip


def environment(inputs: dict[str, str]) -> dict[str, str]:
    return os.environ | {
        "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HOME": f"{inputs['root']}/hf",
        "TORCH_EXTENSIONS_DIR": f"{inputs['root']}/extensions", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(inputs: dict[str, str], ranks: int, *script: str) -> Iterator[subprocess.Popen[str]]:
    """The launcher and its ranks as a process group, of which nothing is left afterwards."""
    launch = [str(DEEPSPEED), "--num_accelerators", str(ranks), "--master_port", str(free_port())]
    job = subprocess.Popen(
        [*launch, *script], env=environment(inputs), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, cwd=inputs["root"], start_new_session=True,
    )  # fmt: skip
    try:
        yield job
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def sft(inputs: dict[str, str], ranks: int, *run: Any) -> tuple[int, str]:
    """Exit code and everything said."""
    with started(inputs, ranks, SFT, *flags_of(inputs, *run)) as job:
        said, _ = job.communicate(timeout=100)
        return job.returncode, said


class Ended(NamedTuple):
    codes: list[int]
    """Of each rank."""
    said: str
    seconds: float
    """Of the slowest."""


def several(inputs: dict[str, str], ranks: int, folder: Path, *runs: Any) -> list[Ended]:
    """How each of the runs ended that one start of the launcher makes one after another."""
    folders = [folder / f"run_{number}" for number in range(len(runs))]
    for each in folders:
        each.mkdir()
    plan = [
        {"folder": str(each), "port": free_port(), "flags": flags_of(inputs, *run)}
        for each, run in zip(folders, runs, strict=True)
    ]
    (folder / "runs.json").write_text(json.dumps(plan))
    with started(inputs, ranks, str(SEVERAL), str(folder / "runs.json")) as job:
        said, _ = job.communicate(timeout=200)
        assert job.returncode == 0, said[-3000:]
    return [ended_in(each, ranks) for each in folders]


def ended_in(folder: Path, ranks: int) -> Ended:
    said = "".join((folder / f"said_{rank}").read_text() for rank in range(ranks))
    codes, seconds = zip(*(json.loads((folder / f"ended_{rank}").read_text()) for rank in range(ranks)), strict=True)
    return Ended(list(codes), said, max(seconds))


def test_two_ranks_train_like_one(inputs: dict[str, str], tmp_path: Path) -> None:
    """Same losses, norms and weights with and without sequence parallelism; the folder opens; nothing is compiled."""
    flags = ("--per_device_train_batch_size", "2", "--num_train_epochs", "2", "--learning_rate", "1e-2",
             "--gradient_accumulation_steps", "2", "--lr_scheduler_type", "cosine", "--warmup_steps", "1")  # fmt: skip
    outputs = {ranks: tmp_path / f"sp{ranks}" for ranks in (1, 2)}
    zero3 = ROOT / "ds_configs" / "zero3.json"
    code, said = sft(inputs, 2, zero3, outputs[2], *flags)
    assert code == 0, said[-3000:]
    assert run_sft(Path(inputs["root"]), 1, flags_of(inputs, zero3, outputs[1], *flags)) == [""]
    one, two = (log_of(outputs[ranks]) for ranks in (1, 2))
    assert [entry["step"] for entry in two] == [1, 2, 3, 4, 5, 6]
    for key in ("loss", "grad_norm", "learning_rate", "epoch", "num_tokens"):
        assert [e[key] for e in two] == pytest.approx([e[key] for e in one], rel=1e-4), key
    assert two[0]["learning_rate"] == 0.0
    assert two[1]["learning_rate"] == 1e-2
    assert two[-1]["epoch"] == 2.0
    assert two[-1]["loss"] < two[0]["loss"]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    models = [AutoModelForCausalLM.from_pretrained(outputs[ranks]) for ranks in (1, 2)]
    for (name, left), (_, right) in zip(*(model.named_parameters() for model in models), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4, msg=name)
    tokenizer = AutoTokenizer.from_pretrained(outputs[2])
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert models[1].generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] > prompt["input_ids"].shape[1]
    built = [path for path in Path(inputs["root"], "extensions").rglob("*") if path.is_file() and path.name != "lock"]
    assert built == []


def test_offload_replicas_and_two_levels(inputs: dict[str, str], tmp_path: Path) -> None:
    """4 ranks as 2 x 2, with everything offloaded, or as two levels: the losses of one rank on the same steps."""
    rows = ("--per_device_train_batch_size", "2", "--max_steps", "2")
    alone = flags_of(inputs, ROOT / "ds_configs" / "zero1.json", tmp_path / "one", *rows)
    assert run_sft(Path(inputs["root"]), 1, alone) == [""]
    offload = ROOT / "ds_configs" / "zero3_offload.json"
    levels = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    levels["ds_ulysses"] = {"strategy": "hierarchical", "ulysses_size": 2, "ring_size": 2}
    (tmp_path / "levels.json").write_text(json.dumps(levels))
    ended = several(
        inputs, 4, tmp_path,
        (offload, tmp_path / "four", "--sequence_parallel_size", "2", "--max_steps", "2"),
        (tmp_path / "levels.json", tmp_path / "levels", *rows),
    )  # fmt: skip
    for each in ended:
        assert each.codes == [0] * 4, each.said[-3000:]
    assert "hierarchical 2 x 2, zigzag layout (set in the config)" in ended[1].said
    one, *others = ([entry["loss"] for entry in log_of(tmp_path / name)] for name in ("one", "four", "levels"))
    for losses in others:
        assert losses == pytest.approx(one, rel=1e-4)


FAULTS: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "no file": (
        {},
        ["--dataset", "missing.jsonl"],
        "Cannot read the dataset 'missing.jsonl', split 'train': there is no such file",
    ),
    "a key": ({"ds_ulysses": {"kernal": "eager"}}, [], "Unknown key 'kernal' in \"ds_ulysses\""),
    "a kernel": (
        {"ds_ulysses": {"kernel": "flash_attn_2"}}, [], "\"kernel\" is 'flash_attn_2', but it runs on cuda, not on cpu",
    ),
    "a size": ({"ds_ulysses": {"ring_size": 4}}, [], 'the sizes must multiply to "sequence_parallel_size", 2'),
    "ranks": (
        {"sequence_parallel_size": 3}, [], '"sequence_parallel_size" is 3, but 2 ranks are not a multiple of it',
    ),
    "a model": (
        {},
        ["--model_name_or_path", "REFUSED"],
        "bamba model cannot be trained with sequence parallelism: layer 0 is linear_attention",
    ),
    "no JSON": ({}, ["--deepspeed", "BAD_JSON"], "is not valid JSON"),
}  # fmt: skip
"""What is wrong in the DeepSpeed JSON, or in the flags, and what is said of it."""


@pytest.fixture(scope="module")
def short(inputs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """A run of two ranks with each fault, and a dry run; none leaves a file."""
    from transformers import BambaConfig

    folder = tmp_path_factory.mktemp("short")
    (folder / "outputs").mkdir()
    BambaConfig().save_pretrained(folder / "bamba")
    (folder / "bad.json").write_text("{")
    places = {"REFUSED": str(folder / "bamba"), "BAD_JSON": str(folder / "bad.json")}
    runs: list[Any] = [(ROOT / "ds_configs" / "zero2.json", folder / "outputs" / "dry", "--dry_run")]
    for name, (config, flags, _) in FAULTS.items():
        (folder / f"{name}.json").write_text(json.dumps({"sequence_parallel_size": 2} | config))
        runs.append((folder / f"{name}.json", folder / "outputs" / name, *(places.get(flag, flag) for flag in flags)))
    ended = several(inputs, 2, folder, *runs)
    assert list((folder / "outputs").iterdir()) == []
    return dict(zip(["dry run", *FAULTS], ended, strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_input_ends_on_every_rank_with_one_message(short: dict[str, Ended], fault: str) -> None:
    codes, said, seconds = short[fault]
    message = re.escape(FAULTS[fault][2])
    assert seconds < 60
    assert 0 not in codes
    assert [len(re.findall(rf"rank {rank}: .*{message}", said)) for rank in (0, 1)] == [1, 1], said[-3000:]
    assert "Traceback" not in said


def test_dry_run_says_everything_and_writes_nothing(short: dict[str, Ended]) -> None:
    codes, said, _ = short["dry run"]
    assert codes == [0, 0], said[-3000:]
    for part in (
        r"mesh +2 ranks = data-parallel 1 x sequence-parallel 2 \(ranks 0 to 1 share a sequence\), on cpu, ZeRO-2",
        r"batch +1 samples per optimizer step = 1 per micro-batch x 1 accumulated x data-parallel 1; 10 steps",
        r"balance +busiest replica 1\.000x the mean; 10 micro-batches per replica and epoch, with one sample each 10;",
        r"data +10 samples",
        r"padding +\d\.\d%",
        r"strategy +ring, zigzag layout \(weighed bytes of ulysses x ring 2 x 1: 20, 1 x 2: 14\); attention",
        r"attention of the busiest ring rank 1\.\d\dx the mean",
        r"heads +6 query / 3 KV heads, per rank 6/3 \(even\)",
        r"kernel +cpu_flash",
        r"exchange +2 messages per layer and micro-batch, at most [\d.]+ MiB \(ring\) sent by this rank per step",
        r'deepspeed +\{.*"stage": 2',
    ):
        assert re.search(part, said), part


def test_an_output_folder_of_another_run_is_not_touched(inputs: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("kept")
    code, said = sft(inputs, 2, ROOT / "ds_configs" / "zero1.json", tmp_path)
    assert code != 0
    assert all(re.search(rf"rank {rank}: .* is not empty", said) for rank in (0, 1)), said[-3000:]
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


@contextmanager
def training(inputs: dict[str, str], output: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A job of two ranks that would go on for ever, in its first steps, and their process ids."""
    flags = flags_of(inputs, ROOT / "ds_configs" / "zero3.json", output, "--max_steps", "100000")
    log, said = output / "train_log.jsonl", ""
    ranks: list[int] = []
    with started(inputs, 2, SFT, *flags) as job:
        assert job.stdout is not None
        while len(ranks) < 2:
            said += job.stdout.readline()
            ranks = [int(pid) for pid in re.findall(r"process (\d+) spawned", said)]
        while not (log.exists() and len(log.read_text().splitlines()) > 2):
            time.sleep(0.1)
        yield job, ranks


def test_a_killed_rank_ends_the_job(inputs: dict[str, str], tmp_path: Path) -> None:
    with training(inputs, tmp_path / "out") as (job, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        begun = time.monotonic()
        said, _ = job.communicate(timeout=60)
        assert job.returncode != 0
    assert time.monotonic() - begun < 60
    assert f"Killing subprocess {ranks[0]}" in said
    assert "exits with return code = -9" in said


def test_a_scheduler_that_takes_the_machine_back_leaves_a_checkpoint(inputs: dict[str, str], tmp_path: Path) -> None:
    """SIGTERM to every rank: the step ends, a checkpoint is written, the job ends with 0."""
    with training(inputs, tmp_path / "out") as (job, ranks):
        for rank in ranks:
            os.kill(rank, signal.SIGTERM)
        said, _ = job.communicate(timeout=60)
        assert job.returncode == 0, said[-3000:]
    step = len(log_of(tmp_path / "out"))
    assert f"stopped after step {step}; go on with --resume_from_checkpoint latest" in said
    assert (tmp_path / "out" / f"checkpoint-{step}" / "manifest.json").exists()
