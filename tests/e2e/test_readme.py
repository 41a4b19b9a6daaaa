"""The README's loop runs as it stands there, and it stays short; links of the pages at the top lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import run_ranks

README = Path(__file__).parents[2] / "README.md"
PAGES = [README, *(README.with_name(f"{name}.md") for name in ("CONTRIBUTING", "CHANGELOG"))]
"""Those that `make docs` does not look at."""


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


def test_it_is_short() -> None:
    assert len(README.read_text().split()) <= 1200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            text = (page.parent / path).read_text()
            assert not anchor or f"## {anchor}" in text.lower().replace(" ", "-").replace("#-", "# "), link
