"""`ds-ulysses check` says that all is the same where it is, and that it is not where something is broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.distributed import run_ranks
from tests.models import ARCHITECTURES
from tests.quick import slow
from tests.tokenizers import tiny_checkpoint


def checked(model: str, config: str, layers: int, dtype: str, broken: bool = False) -> tuple[str, bool]:
    from ds_ulysses.engine import comparison
    from ds_ulysses.engine.start import initialize

    def off_by_the_group(**arguments: Any) -> tuple[Any, ...]:
        engine, *rest = initialize(**arguments)
        engine.normalizer.factor *= 2
        return engine, *rest

    subject = comparison.Subject(model, config, layers, 101, dtype)
    with patch.object(comparison, "initialize", off_by_the_group if broken else initialize):
        return comparison.check(subject)


@pytest.mark.parametrize(
    ("kind", "ranks", "json_changes", "layers", "dtype"),
    [
        ("llama", 2, {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}, 1, "fp32"),
        slow("llama", 2, {"sequence_parallel_size": "auto", "optimizer": {"type": "AdamW"}}, 0, "fp32"),
        slow("gemma2", 4, {"sequence_parallel_size": 2, "ds_ulysses": {"strategy": "ring"}}, 2, "fp32"),
        slow("gpt2", 2, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, 2, "fp32"),
        slow("llama", 2, {"zero_optimization": {"stage": 1}}, 2, "bf16"),
    ],
)
def test_check(tmp_path: Path, kind: str, ranks: int, json_changes: dict[str, object], layers: int, dtype: str) -> None:
    changes = {key: value for key, value in ARCHITECTURES[kind].items() if key not in ("resid_pdrop", "embd_pdrop")}
    tiny_checkpoint(tmp_path / "model", kind=kind, **changes)
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": "auto"} | json_changes))
    results = run_ranks(checked, ranks, str(tmp_path / "model"), str(tmp_path / "ds.json"), layers, dtype)
    table, same = results[0]
    assert all(result[1] for result in results)
    assert same, table
    assert f"{layers or 2} layers, 101 tokens in 2 documents, {dtype}; {ranks} ranks" in table
    loss = re.search(r"loss +([\d.]+) +([\d.]+) +(\S+)", table)
    assert loss, table
    assert float(loss[1]) == pytest.approx(float(loss[2]), rel=1e-5 if dtype == "fp32" else 5e-2)
    assert re.search(r"messages of rank 0 +[1-9]\d* forward, [1-9][\d,]* bytes; [1-9]\d* backward", table)
    assert "verdict: the same, to rounding" in table


def test_a_gradient_that_is_off_by_a_factor_is_seen(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    (tmp_path / "ds.json").write_text("{}")
    (table, same), _ = run_ranks(checked, 2, str(tmp_path / "model"), str(tmp_path / "ds.json"), 2, "fp32", True)
    assert not same
    assert re.search(r"norm of the gradient +\S+ +\S+ +1\.0e\+00", table), table
    assert "NOT THE SAME" in table


@pytest.mark.e2e
def test_the_command_starts_its_own_ranks(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    (tmp_path / "ds.json").write_text("{}")
    command = [sys.executable, "-m", "ds_ulysses", "check", "--model", str(tmp_path / "model"), "--ranks", "2"]
    command += ["--deepspeed", str(tmp_path / "ds.json"), "--tokens", "50"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment.pop("RANK", None)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "verdict: the same, to rounding" in ended.stdout
