"""Everything that leaves a rank: process groups, collectives, the exchange of Ulysses, and the ledger that counts it.

No other room but the engine talks to torch.distributed.
"""

from torch.distributed import ProcessGroup

from ds_ulysses.comm.channels import ChannelTable
from ds_ulysses.comm.collectives import (
    Pending,
    any_rank,
    barrier,
    everybody,
    leave,
    members,
    one_ahead,
    same_on_all_ranks,
    start_all_gather,
    start_reduce_scatter,
    start_shift,
    sum_over_world,
)
from ds_ulysses.comm.exchange import gather_channels, place, scatter_channels, start_gather, start_scatter
from ds_ulysses.comm.ledger import Ledger, ledger
from ds_ulysses.comm.topology import Topology, whole_group
from ds_ulysses.comm.transport import Ring
from ds_ulysses.comm.turns import in_turns, my_turn, once

__all__ = [
    "ChannelTable",
    "Ledger",
    "Pending",
    "ProcessGroup",
    "Ring",
    "Topology",
    "any_rank",
    "barrier",
    "everybody",
    "gather_channels",
    "in_turns",
    "leave",
    "ledger",
    "members",
    "my_turn",
    "once",
    "one_ahead",
    "place",
    "same_on_all_ranks",
    "scatter_channels",
    "start_all_gather",
    "start_gather",
    "start_reduce_scatter",
    "start_scatter",
    "start_shift",
    "sum_over_world",
    "whole_group",
]
