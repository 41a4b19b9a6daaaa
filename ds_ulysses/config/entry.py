"""One line of the ledger: what the ledger counts and the planner predicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Entry:
    """One collective of the ledger. `bytes_sent` leaves out what a rank keeps; for an all-reduce it is the payload."""

    op: str
    level: str
    dtype: str
    """By its short name: fp32, bf16, ..."""
    bytes_sent: int
    direction: Direction
