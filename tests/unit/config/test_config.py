"""Settings check themselves, and each refusal names the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ulysses import SequenceParallelConfig
from ds_ulysses.config.deepspeed_json import REFUSALS, resolve_batch_sizes

FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"sequence_parallel_size": 0}, "sequence_parallel_size.* is 0"),
    ({"sequence_parallel_size": "2"}, "sequence_parallel_size.* is '2'"),
    ({"sequence_parallel_size": True}, "sequence_parallel_size.* is True"),
    ({"ds_ulysses": {"stratgy": "ulysses"}}, "Unknown key 'stratgy'.*Known keys: grad_dtype, kernel, layout"),
    ({"ds_ulysses": {"sequence_parallel_size": 2}}, "Unknown key 'sequence_parallel_size'"),
    ({"ds_ulysses": []}, "must be an object"),
    ({"ds_ulysses": {"strategy": "p2p"}}, "strategy.* is 'p2p'.*auto, ulysses, ring, all_gather, hierarchical"),
    ({"ds_ulysses": {"layout": "striped"}}, "layout.* is 'striped'"),
    ({"ds_ulysses": {"kernel": "fast"}}, "kernel.* is 'fast'"),
    ({"ds_ulysses": {"ring_size": 0}}, "ring_size.* is 0"),
    ({"ds_ulysses": {"ulysses_size": "2"}}, "ulysses_size.* is '2'"),
    ({"ds_ulysses": {"ulysses_head_groups": 0}}, "ulysses_head_groups.* is 0"),
    ({"ds_ulysses": {"grad_dtype": "fp8"}}, "grad_dtype.* is 'fp8'"),
    ({"ds_ulysses": {"packed": "yes"}}, "packed.* is 'yes'"),
    ({"ds_ulysses": {"logits_tile_size": 0}}, "logits_tile_size.* is 0"),
]

REFUSED: dict[str, Any] = {
    "data_parallel_size": 2,
    "tensor_parallel.autotp_size": 2,
    "zero_optimization.zero_hpz_partition_size": 2,
    "zero_optimization.mics_shard_size": 2,
    "zero_optimization.zero_quantized_weights": True,
    "zero_optimization.zero_quantized_gradients": True,
    "zero_optimization.zenflow": {"topk_ratio": 0.1},
    "hybrid_engine.enabled": True,
    "sparse_gradients": True,
    "torch_autocast.enabled": True,
    "managed_gradient_accumulation": False,
    "curriculum_learning.enabled": True,
    "data_efficiency.enabled": True,
    "progressive_layer_drop.enabled": True,
    "compile.passes": ["autosp"],
    "optimizer.type": "OneBitAdam",
}


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def test_defaults_are_no_sequence_parallelism() -> None:
    assert SequenceParallelConfig.from_deepspeed({}) == SequenceParallelConfig(sequence_parallel_size=1)


def test_read_from_file_and_dict_alike(tmp_path: Path) -> None:
    config = {"sequence_parallel_size": 4, "ds_ulysses": {"kernel": "eager"}, "anything_of_deepspeed": 1}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    assert SequenceParallelConfig.from_deepspeed(path) == SequenceParallelConfig.from_deepspeed(config)
    assert SequenceParallelConfig.from_deepspeed(config).kernel == "eager"


@pytest.mark.parametrize(("config", "message"), FAULTS, ids=lambda x: str(x)[:40])
def test_faults_name_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceParallelConfig.from_deepspeed(config)


def test_every_refusal_is_tried() -> None:
    assert {refusal.path for refusal in REFUSALS} == set(REFUSED)


@pytest.mark.parametrize("path", REFUSED)
def test_inexact_deepspeed_settings_are_refused_only_with_sequence_parallelism(path: str) -> None:
    config = nested(path, REFUSED[path])
    SequenceParallelConfig.from_deepspeed(config)
    with pytest.raises(ValueError, match=f'"{path}".*cannot be used with sequence parallelism'):
        SequenceParallelConfig.from_deepspeed(config | {"sequence_parallel_size": 2})


def test_zero3_without_reduce_scatter_is_refused() -> None:
    config = {"sequence_parallel_size": 2, "zero_optimization": {"stage": 3, "reduce_scatter": False}}
    with pytest.raises(ValueError, match="reduce_scatter.*ZeRO-3"):
        SequenceParallelConfig.from_deepspeed(config)
    config["zero_optimization"] = {"stage": 2, "reduce_scatter": False}
    SequenceParallelConfig.from_deepspeed(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"a": 1, "a": 2}', "'a' twice"),
        (None, "Cannot read"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        SequenceParallelConfig.from_deepspeed(path)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.sampled_from(range(1, 8)))
def test_batch_sizes_are_filled_in(micro: int, accumulation: int, dp: int, given_keys: int) -> None:
    full = {
        "train_batch_size": micro * accumulation * dp,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    config = {key: value for bit, (key, value) in enumerate(full.items()) if given_keys >> bit & 1}
    if given_keys == 4:  # accumulation alone leaves the batch size open
        with pytest.raises(ValueError, match="Give .train_micro_batch_size_per_gpu"):
            resolve_batch_sizes(config, dp)
        return
    sizes = resolve_batch_sizes(config, dp)
    assert sizes.train == sizes.micro * sizes.accumulation * dp
    assert all(
        config[key] == value
        for key, value in zip(full, (sizes.train, sizes.micro, sizes.accumulation), strict=True)
        if key in config
    )


@pytest.mark.parametrize(
    "config",
    [
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3},
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2},
        {"train_batch_size": 1},
        {"train_batch_size": 3, "gradient_accumulation_steps": 2},
    ],
)
def test_contradicting_batch_sizes_are_refused_with_their_numbers(config: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f'"train_batch_size" is {config["train_batch_size"]}.*size 2'):
        resolve_batch_sizes(config, dp_size=2)


@pytest.mark.parametrize("value", [0, -1, 1.5, "auto"])
def test_batch_sizes_must_be_whole_numbers(value: object) -> None:
    with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu"):
        resolve_batch_sizes({"train_micro_batch_size_per_gpu": value}, dp_size=1)
