"""What `make quick` leaves out: cases that seldom fail where the others of their table do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*case: Any) -> Any:
    """A case for `pytest.mark.parametrize` that only the whole suite runs."""
    return pytest.param(*case, marks=pytest.mark.slow)


def slow_but(quick: set[str], cases: Iterable[str]) -> list[Any]:
    """Of these cases, each one word, `make quick` runs some."""
    return [case if case in quick else slow(case) for case in cases]
