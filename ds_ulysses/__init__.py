"""Exact long-context training of Hugging Face models on DeepSpeed."""

from ds_ulysses.attention.distributed import DistributedAttention
from ds_ulysses.attention.ulysses import gather_heads_scatter_seq, gather_seq_scatter_heads
from ds_ulysses.batch import shard_batch
from ds_ulysses.config import SequenceParallelConfig
from ds_ulysses.engine import initialize
from ds_ulysses.ledger import ledger
from ds_ulysses.patch import patch_model, unpatch_model
from ds_ulysses.predict import AttentionShape, predict
from ds_ulysses.topology import Topology

__all__ = [
    "AttentionShape",
    "DistributedAttention",
    "SequenceParallelConfig",
    "Topology",
    "gather_heads_scatter_seq",
    "gather_seq_scatter_heads",
    "initialize",
    "ledger",
    "patch_model",
    "predict",
    "shard_batch",
    "unpatch_model",
]
