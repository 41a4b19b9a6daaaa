"""What every mixer promises: a module that mixes the tokens of a sequence, of which each rank holds a shard.

A decoder layer has one mixer or several (attention beside a state space, say). Each kind says what it needs exchanged
between the ranks and what of a document's state it carries from one shard to the next, so that the rest of the house
can tell what a layer costs and whether a placement suits it. The patcher finds the injector of a module's kind in
`models/injectors.py`.
"""

from __future__ import annotations

from abc import ABC
from typing import ClassVar

from torch import nn


class Mixer(nn.Module, ABC):
    """A module that is handed a shard of each tensor, and the batch's `Placement`."""

    kind: ClassVar[str]
    """One word, such as softmax."""
    exchanges: ClassVar[tuple[str, ...]]
    """The tensors that travel between ranks."""
    carries: ClassVar[str | None]
    """What of a document's state goes from its one shard to the next; None: nothing, all shards work at once."""

    def __init__(self) -> None:
        super().__init__()
        self.has_mixed = False
        """Set by every forward: how a patched model proves that none of its mixers was bypassed."""
