"""`train/sft.py` inside ranks of the tests, without a launcher, on a tiny model and data."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from tests.distributed import RankFailed, run_ranks
from tests.tokenizers import WORDS, tiny_checkpoint

QUESTIONS = WORDS.split()


def inputs(folder: Path, num_samples: int = 12, **model: Any) -> Path:
    """A model, data.jsonl with chats of many lengths, and DeepSpeed JSONs zero0 to zero3."""
    tiny_checkpoint(folder / "model", num_attention_heads=6, num_key_value_heads=3, hidden_size=48, **model)
    write_chats(folder / "data.jsonl", num_samples, growth=5)
    for stage in range(4):
        # Weights as small as these would by default not be cut, and fetched ahead all at once.
        zero = {"stage": stage}
        if stage == 3:
            zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 2000}
        config = {"zero_optimization": zero, "sequence_parallel_size": "auto"}
        (folder / f"zero{stage}.json").write_text(json.dumps(config))
    return folder


def write_chats(file: Path, num_samples: int, growth: int) -> None:
    """Each answer has `growth` words more than the one before."""
    answers = [
        " ".join(QUESTIONS[(i * j) % len(QUESTIONS)] for j in range(1, 6 + growth * i)) for i in range(num_samples)
    ]
    chats = [
        [{"role": "user", "content": QUESTIONS[i % 20]}, {"role": "assistant", "content": answer}]
        for i, answer in enumerate(answers)
    ]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


class Fault(NamedTuple):
    """What goes wrong, and in which step of this start."""

    kind: str
    """killed: one rank dies before it; all killed; saving: a rank dies with its checkpoint half written; term: a rank
    is asked to stop; full: the disk takes no more than some kilobytes a file; stuck: a rank does not come back;
    no data: nor does the disk that it reads this sample from."""
    step: int
    rank: int = 1


def sft(folder: Path, ranks: int, output: Path, *flags: str, stage: int = 3, fault: Fault | None = None) -> list[str]:
    """What each rank says at its end: nothing, or its error. What the first one printed is in the file `said`."""
    return run_sft(folder, ranks, arguments_of(folder, output, stage, *flags), fault)


def run_sft(folder: Path, ranks: int, arguments: tuple[str, ...], fault: Fault | None = None) -> list[str]:
    """The same with all arguments given; caches, and the file, lie in the folder."""
    return run_ranks(_sft, ranks, str(folder), arguments, fault)


def tokens_seen(
    folder: Path, ranks: int, output: Path, *flags: str, stage: int = 3, fault: Fault | None = None
) -> list[list[list[int]]]:
    """`sft`; of each rank and micro-batch, the tokens that its model was given."""
    return run_ranks(_watched_sft, ranks, str(folder), arguments_of(folder, output, stage, *flags), fault)


def arguments_of(folder: Path, output: Path, stage: int, *flags: str) -> tuple[str, ...]:
    return (
        "--model_name_or_path", str(folder / "model"), "--dataset", str(folder / "data.jsonl"),
        "--deepspeed", str(folder / f"zero{stage}.json"), "--output_dir", str(output), "--max_length", "60",
        "--learning_rate", "1e-2", *flags,
    )  # fmt: skip


def killed(*arguments: Any, **options: Any) -> None:
    """`sft`, of which a rank dies."""
    with pytest.raises(RankFailed, match="died without a word"):
        sft(*arguments, **options)


def _watched_sft(*arguments: Any) -> list[list[int]]:
    from ds_ulysses.batch import shard_batch
    from ds_ulysses.training import evaluation, loop

    seen: list[list[int]] = []

    def watched(*batch: Any) -> Any:
        shard = shard_batch(*batch)
        seen.append(shard["input_ids"].flatten().tolist())
        return shard

    with patch.object(loop, "shard_batch", watched), patch.object(evaluation, "shard_batch", watched):
        assert _sft(*arguments) == ""
    return seen


def _sft(folder: str, arguments: tuple[str, ...], fault: Fault | None) -> str:
    import datasets
    import torch.distributed as dist

    import train.sft

    if fault is not None and fault.kind in ("stuck", "no data"):  # stacks are written to the file descriptor
        os.dup2(os.open(f"{folder}/stderr_{dist.get_rank()}", os.O_CREAT | os.O_WRONLY), 2)
    datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
    datasets.disable_progress_bars()
    with (
        (Path(folder) / ("said" if dist.get_rank() == 0 else os.devnull)).open("w") as said,
        redirect_stdout(said),
        _faulty(fault),
        patch.object(dist, "destroy_process_group"),
        patch.object(sys, "argv", ["sft.py", *arguments]),
    ):
        try:
            train.sft.main()
        except SystemExit as end:
            return str(end.code)
    return ""


@contextmanager
def _faulty(fault: Fault | None) -> Iterator[None]:
    """Steps, saving and reading go wrong as `fault` says; every step's samples are written down."""
    import torch.distributed as dist

    from ds_ulysses.data import Samples
    from ds_ulysses.engine import save_state
    from ds_ulysses.training import loop
    from ds_ulysses.training.saving import checkpoints

    one_step, done = loop.one_step, 0
    fetch, fetched = Samples.fetch, 0

    def faulty_step(run: Any, step: Any, *rest: Any) -> None:
        nonlocal done
        done += 1
        if fault is not None and done == fault.step:
            _go_wrong(fault)
        one_step(run, step, *rest)
        if run.rank == 0:
            with (run.output_dir / "ids.jsonl").open("a") as file:
                file.write(json.dumps([run.progress.step, sorted(d.id for d in step.order.documents)]) + "\n")

    def faulty_fetch(*arguments: Any) -> Any:
        nonlocal fetched
        fetched += 1
        if fault is not None and fault.kind == "no data" and (fetched, dist.get_rank()) == (fault.step, fault.rank):
            time.sleep(60)
        return fetch(*arguments)

    def faulty_save(engine: Any, target: Path) -> None:
        save_state(engine, target)
        if fault is not None and fault.kind == "saving" and done >= fault.step and engine.topology.rank == fault.rank:
            os.kill(os.getpid(), signal.SIGKILL)

    with (
        patch.object(loop, "one_step", faulty_step),
        patch.object(checkpoints, "save_state", faulty_save),
        patch.object(Samples, "fetch", faulty_fetch),
    ):
        yield


def _go_wrong(fault: Fault) -> None:
    import torch.distributed as dist

    if fault.kind == "all killed" or (fault.kind == "killed" and dist.get_rank() == fault.rank):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "term" and dist.get_rank() == fault.rank:
        os.kill(os.getpid(), signal.SIGTERM)
    if fault.kind == "stuck" and dist.get_rank() == fault.rank:
        time.sleep(60)
    if fault.kind == "full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def log_of(output: Path) -> list[dict[str, float]]:
    """Entries of optimizer steps."""
    entries = [json.loads(line) for line in (output / "train_log.jsonl").read_text().splitlines()]
    return [entry for entry in entries if "loss" in entry]


def evaluations_of(output: Path) -> list[dict[str, float]]:
    entries = [json.loads(line) for line in (output / "train_log.jsonl").read_text().splitlines()]
    return [entry for entry in entries if "eval_loss" in entry]


def ids_of(output: Path) -> dict[int, list[int]]:
    """Sample ids of each optimizer step; of its last run, if it ran more than once."""
    return dict(json.loads(line) for line in (output / "ids.jsonl").read_text().splitlines())
