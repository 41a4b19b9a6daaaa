"""What a mask leaves, in integers and as a boolean matrix.

Shapes: Lq and Lk query and key tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_ulysses.kernels.contract import Mask


def empty_rows(num_queries: int, num_keys: int, mask: Mask) -> tuple[int, int]:
    """Count the queries at the start and at the end that see no key at all."""
    offset = num_keys - num_queries
    before = -(offset + mask.right) if mask.right >= 0 else 0
    after = num_queries + offset - mask.left - num_keys if mask.left >= 0 else 0
    before = min(max(before, 0), num_queries)
    return before, min(max(after, 0), num_queries - before)


def visible(num_queries: int, num_keys: int, mask: Mask, device: torch.device) -> Tensor:
    """Return which query sees which key: [Lq, Lk] boolean."""
    distance = torch.arange(num_keys, device=device) - torch.arange(num_queries, device=device)[:, None]
    distance = distance - (num_keys - num_queries)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if mask.left >= 0:
        seen &= distance >= -mask.left
    if mask.right >= 0:
        seen &= distance <= mask.right
    return seen
