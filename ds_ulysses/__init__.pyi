from .batch import shard_batch as shard_batch
from .comm import Topology as Topology
from .comm import ledger as ledger
from .config import SequenceParallelConfig as SequenceParallelConfig
from .engine import init_distributed as init_distributed
from .engine import initialize as initialize
from .engine import settle as settle
from .mixers import DistributedAttention as DistributedAttention
from .mixers import gather_heads_scatter_seq as gather_heads_scatter_seq
from .mixers import gather_seq_scatter_heads as gather_seq_scatter_heads
from .models import patch_model as patch_model
from .models import unpatch_model as unpatch_model
from .planning import AttentionShape as AttentionShape
from .planning import predict as predict

__version__: str
