"""The README's loop runs as it stands there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import torch.distributed as dist

from tests.distributed import run_ranks

README = Path(__file__).parents[2] / "README.md"


def run_example(code: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    return said.getvalue() if dist.get_rank() == 0 else ""


def test_the_loop() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    losses = [float(x) for x in re.findall(r"step \d: loss ([\d.]+)", run_ranks(run_example, 2, code)[0])]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
