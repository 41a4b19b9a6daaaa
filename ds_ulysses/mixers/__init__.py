"""What mixes tokens: for each kind a contract of what it needs exchanged, and how it is computed on shards.

`softmax/` is attention: Ulysses, ring, all-gather, hierarchical, behind `DistributedAttention`.
"""

from ds_ulysses.mixers.contract import Mixer
from ds_ulysses.mixers.softmax.distributed import DistributedAttention
from ds_ulysses.mixers.softmax.ulysses import gather_heads_scatter_seq, gather_seq_scatter_heads

__all__ = ["DistributedAttention", "Mixer", "gather_heads_scatter_seq", "gather_seq_scatter_heads"]
