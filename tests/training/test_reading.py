"""One rank tokenises, the others wait as long as it takes and find the result; a refusal is heard on all."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from ds_ulysses.comm.turns import in_turns
from ds_ulysses.data.samples import Samples, count
from ds_ulysses.training.arguments import SftArguments
from tests.distributed import run_ranks
from tests.tokenizers import word_tokenizer
from tests.unit.data.test_samples import chat


def check_patience() -> list[float]:
    """Rank 0 takes three times as long as a collective may."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
    begun = []

    def read() -> Any:
        begun.append(time.monotonic())
        if dist.get_rank() == 0:
            time.sleep(3)
        return "samples"

    turn = (0, 2, 1, 2)[dist.get_rank()]
    assert in_turns(read, turn) == "samples"
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=60), dist.group.WORLD)
    return begun


@pytest.mark.slow
def test_others_wait_longer_than_a_collective_may_take() -> None:
    (first,), (third,), (second,), (fourth,) = run_ranks(check_patience, 4)
    assert first + 3 <= second < min(third, fourth)


def check_refusal(faulty: int) -> str:
    def read() -> None:
        if dist.get_rank() == faulty:
            raise ValueError("There is no dataset file here.")

    with pytest.raises(ValueError, match="no dataset") as refusal:
        in_turns(read, 0 if dist.get_rank() == 0 else 1)
    return str(refusal.value)


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_refusal_of_one_is_a_refusal_of_all(faulty: int) -> None:
    assert run_ranks(check_refusal, 3, faulty) == ["There is no dataset file here."] * 3


def check_read(folder: str, options: dict[str, Any]) -> tuple[list[list[int]], int, list[float]]:
    """What the samples are, how many files were written for them, and when this rank had tokenised."""
    import datasets

    from ds_ulysses.training import reading

    datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
    tokenised = []

    def slow_count(rows: Any, max_length: int) -> Samples:
        time.sleep(0.3)
        tokenised.append(time.monotonic())
        return count(rows, max_length)

    arguments = SftArguments(
        model_name_or_path="m", deepspeed="z", output_dir="o", max_length=24,
        dataset=[f"{folder}/a.jsonl", f"{folder}/b.jsonl"], **options,
    )  # fmt: skip
    with patch.object(reading, "count", slow_count):
        samples = reading.read_data(arguments, word_tokenizer())
    ids = [samples.fetch(document)["input_ids"] for document in samples.documents(0, 0)]
    dist.barrier()
    return ids, len(list((Path(folder) / "cache").rglob("*.arrow"))), tokenised


@pytest.mark.parametrize("options", [{}, {"dataset_weights": [1.0, 2.0]}, {"streaming": True, "max_steps": 1}])
def test_ranks_read_alike_and_tokenise_once(tmp_path: Path, options: dict[str, Any]) -> None:
    found = {}
    for ranks in (1, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        for name, word in (("a", "one"), ("b", "two")):
            rows = [chat(f"{word} " * (i % 7)) for i in range(20)]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found[ranks] = run_ranks(check_read, ranks, str(folder), options)
    assert [result[:2] for result in found[3]] == [found[1][0][:2]] * 3
    assert len(found[1][0][0]) >= 34
    if "streaming" not in options:
        (first,), *others = (times for *_, times in found[3])
        assert all(first + 0.3 <= time for (time,) in others), "they begin when the first has ended"
