"""Who sees which sample when, told by the tokens that reach the model: a sample is one word, some times."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.quick import slow
from tests.tokenizers import WORDS, word_tokenizer
from tests.training.trainer import QUESTIONS, Fault, inputs, tokens_seen

WORD_IDS = {token: number for number, token in enumerate(word_tokenizer().convert_tokens_to_ids(WORDS.split()))}


def written(folder: Path, num_samples: int) -> Path:
    """Sample i says word i, i + 3 times."""
    inputs(folder)
    rows = [{"prompt": word, "completion": f" {word}" * (i + 2)} for i, word in enumerate(QUESTIONS[:num_samples])]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def samples_in(*pieces: list[int]) -> Counter[int]:
    """How many tokens of each sample."""
    return Counter(WORD_IDS[token] for piece in pieces for token in piece if token in WORD_IDS)


def whole(*samples: int) -> Counter[int]:
    return Counter({i: i + 3 for i in samples})


def test_ranks_of_a_group_share_a_sample_and_groups_have_others(tmp_path: Path) -> None:
    """10 samples, 4 ranks in pairs, 2 epochs."""
    ranks = tokens_seen(
        written(tmp_path, 10), 4, tmp_path / "out", "--num_train_epochs", "2", "--sequence_parallel_size", "2"
    )
    epochs = []
    for half in (slice(0, 5), slice(5, 10)):
        order = []
        for a, b, c, d in zip(*(rank[half] for rank in ranks), strict=True):
            first, second = samples_in(a, b), samples_in(c, d)
            (one,), (other,) = first, second
            assert (first, second) == (whole(one), whole(other)), "all of a sample, once"
            assert min(map(len, (a, b, c, d))) > 0
            order += [one, other]
        assert sorted(order) == list(range(10))
        epochs.append(order)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("num_samples", [slow(1), 5])
@pytest.mark.parametrize("streaming", [slow(False), True])
def test_where_samples_run_short_ranks_go_on_together(tmp_path: Path, num_samples: int, streaming: bool) -> None:
    """Rows of two on 2 replicas of 2 ranks, twice over the data: some, or all but one, replicas have none left."""
    num_steps = 2 * (num_samples // 4 + 1)
    flags = ["--per_device_train_batch_size", "2", "--sequence_parallel_size", "2", "--max_steps", str(num_steps)]
    flags += ["--streaming"] * streaming
    ranks = tokens_seen(written(tmp_path, num_samples), 4, tmp_path / "out", *flags)
    assert [len(rank) for rank in ranks] == [num_steps] * 4
    for epoch in (slice(0, num_steps // 2), slice(num_steps // 2, None)):
        assert samples_in(*(tokens for rank in ranks for tokens in rank[epoch])) == whole(*range(num_samples))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--packing",), ("--padding_free",)], ids=str)
def test_a_run_that_stops_twice_sees_what_the_unbroken_one_sees(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """12 samples, 2 replicas of 2 ranks, 2 accumulated; it stops after the second step of the first epoch, and after
    the first of the second."""
    folder = written(tmp_path, 12)
    flags = (*flags, "--gradient_accumulation_steps", "2", "--sequence_parallel_size", "2", "--max_length", "20")
    flags = (*flags, "--num_train_epochs", "2")
    unbroken = tokens_seen(folder, 4, tmp_path / "unbroken", *flags)
    num_steps = len(unbroken[0]) // 2
    again = ("--resume_from_checkpoint", "latest")
    parts = [
        tokens_seen(folder, 4, tmp_path / "out", *flags, *again, fault=fault)
        for fault in (Fault("term", 2), Fault("term", num_steps // 2 + 1 - 2), None)
    ]
    assert [len(part[0]) for part in parts] == [4, num_steps + 2 - 4, num_steps - 2]
    assert [[tokens for part in parts for tokens in part[rank]] for rank in range(4)] == unbroken
    for epoch in (slice(0, num_steps), slice(num_steps, None)):
        assert samples_in(*(tokens for rank in unbroken for tokens in rank[epoch])) == whole(*range(12))
