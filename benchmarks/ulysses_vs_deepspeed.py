"""Our attention beside DeepSpeed's own UlyssesSPAttentionHF, in turns, in one run, on one Llama shape.

    python -m benchmarks.ulysses_vs_deepspeed

Both sides run the same Llama decoder forward and backward on the same gloo ranks, with torch's CPU flash kernel.
Collectives and bytes are counted where torch.distributed is called, copies and memory by the profiler: the same
instruments for both. Times are medians over the turns; on a machine that does other work only their ratio counts.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import profile

from benchmarks.measure import peak_memory
from tests.distributed import run_ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 8, 2, 64, 4
COPIES = ("aten::copy_", "aten::cat")
"""What every clone, contiguous, reshape and concatenation ends in."""


@dataclass
class Side:
    """One implementation: a decoder whose attention it has replaced, and this rank's shard of the input."""

    model: PreTrainedModel
    inputs: dict[str, Tensor]

    def step(self) -> None:
        self.model.zero_grad()
        self.model(**self.inputs, use_cache=False).last_hidden_state.sum().backward()

    def attention(self) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
        """Forward and backward of one layer's attention alone, from q, k and v as Hugging Face shapes them."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        layer = self.model.layers[0].self_attn
        tokens = self.inputs["input_ids"].shape[1]
        q, k, v = (torch.randn(1, tokens, h, HEAD_DIM).transpose(1, 2) for h in (HEADS, KV_HEADS, KV_HEADS))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        function = ALL_ATTENTION_FUNCTIONS[self.model.config._attn_implementation]
        keywords = {"scaling": HEAD_DIM**-0.5, "dropout": 0.0, "position_ids": self.inputs["position_ids"]}
        return lambda: function(layer, *leaves, None, **keywords)[0], lambda out: out.backward(torch.ones_like(out))


def decoder(tokens: int) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM, intermediate_size=1024, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=256, max_position_embeddings=tokens, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaModel(config).train()


def token_ids(tokens: int) -> Tensor:
    return torch.randint(0, 256, (1, tokens), generator=torch.Generator().manual_seed(1))


def ours(sp_size: int, tokens: int) -> Side:
    import ds_ulysses

    config = ds_ulysses.SequenceParallelConfig(sequence_parallel_size=sp_size, strategy="ulysses")
    topology = ds_ulysses.Topology.create(config)
    model = decoder(tokens)
    ds_ulysses.patch_model(model, topology)
    return Side(model, ds_ulysses.shard_batch({"input_ids": token_ids(tokens)}, topology))


def deepspeeds(sp_size: int, tokens: int) -> Side:
    """Set up as DeepSpeed's tutorial does. From here on it holds the process's "sdpa"."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    model = decoder(tokens)
    UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=sp_size,
        micro_batch_size=1, seq_length=tokens, seq_length_is_variable=True,
    )  # fmt: skip
    whole = {"input_ids": token_ids(tokens), "position_ids": torch.arange(tokens)[None]}
    return Side(model, {key: x.chunk(sp_size, dim=1)[dist.get_rank()].contiguous() for key, x in whole.items()})


@contextmanager
def counting(sent: list[int]) -> Iterator[None]:
    """Append the bytes that each collective sends to other ranks. Both sides use one group of all ranks."""
    world, originals = dist.get_world_size(), {}

    def counted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            tensor = next(given[key] for key in ("input", "tensor", "input_tensor") if key in given)
            size, splits = tensor.numel() * tensor.element_size(), given.get("input_split_sizes")
            even = size // world * (world - 1) if name == "all_to_all_single" else size * (world - 1)
            sent.append(size - splits[dist.get_rank()] * tensor.element_size() if splits else even)
            return original(*args, **kwargs)

        return call

    for name in ("all_to_all_single", "all_gather", "all_gather_into_tensor", "all_gather_single"):
        originals[name] = getattr(dist, name)
        setattr(dist, name, counted(name, originals[name]))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def measure_attention(side: Side) -> dict[str, list[float]]:
    """Collectives, MiB sent and MiB copied of one layer: [forward, backward]."""
    forward, backward = side.attention()
    backward(forward())  # whatever is set up once is set up now
    found: dict[str, list[float]] = {"collectives": [], "sent": [], "copied": []}
    out: list[Tensor] = []
    for phase in (lambda: out.append(forward()), lambda: backward(out[0])):
        sent: list[int] = []
        with counting(sent), profile(record_shapes=True, profile_memory=True) as profiled:
            phase()
        found["collectives"].append(len(sent))
        found["sent"].append(sum(sent) / 2**20)
        found["copied"].append(sum(map(bytes_copied, profiled.events())) / 2**20)
    return found


def bytes_copied(event: Any) -> int:
    """Bytes that a copy writes: the size of the target of copy_ and cat(out=), or what a plain cat allocates."""
    if event.name not in COPIES:
        return 0
    targets = [shape for shape in event.input_shapes if shape]
    return torch.Size(targets[-1]).numel() * 4 if targets else event.cpu_memory_usage


def compare(sp_size: int, tokens: int, turns: int) -> list[dict[str, Any]]:
    """On each rank: everything about ours, then about DeepSpeed's."""
    import ds_ulysses

    ds_ulysses.init_distributed()  # DeepSpeed's wrapper asks for its own
    sides = [ours(sp_size, tokens), deepspeeds(sp_size, tokens)]
    found: list[dict[str, Any]] = [{**measure_attention(side), "memory": peak_memory(side.step)} for side in sides]
    seconds: list[list[float]] = [[], []]
    for turn in range(turns):
        for index in (0, 1) if turn % 2 == 0 else (1, 0):
            dist.barrier()
            begun = time.perf_counter()
            sides[index].step()
            dist.barrier()
            seconds[index].append(time.perf_counter() - begun)
    for result, times in zip(found, seconds, strict=True):
        result["seconds"] = times
    return found


def row(sp_size: int, tokens: int, turns: int) -> str:
    ranks = run_ranks(compare, sp_size, sp_size, tokens, turns, limit=900)
    ratios = sorted(a / b for a, b in zip(*(side["seconds"] for side in ranks[0]), strict=True))
    cells = [f"sp {sp_size}"]
    for name in ("collectives", "sent", "copied"):
        for phase in (0, 1):
            values = [max(rank[side][name][phase] for rank in ranks) for side in (0, 1)]
            cells.append(" / ".join(f"{value:.4g}" for value in values))
    cells.append(" / ".join(f"{max(rank[side]['memory'] for rank in ranks) / 2**20:.0f}" for side in (0, 1)))
    cells.append(f"{statistics.median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sp", type=int, nargs="+", default=[2, 4], help="group sizes")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the whole sequence")
    parser.add_argument("--turns", type=int, default=9, help="timed steps of each side")
    arguments = parser.parse_args()
    print(f"Llama, {HEADS} query and {KV_HEADS} KV heads of {HEAD_DIM}, {arguments.tokens} tokens; ours / DeepSpeed's")
    columns = [f"{what} {way}" for what in ("collectives", "MiB sent", "MiB copied") for way in ("forward", "backward")]
    print("| | " + " | ".join([*columns, "peak MiB", "time ratio (least to most)"]) + " |")
    print("|" + "---|" * (len(columns) + 3))
    for sp_size in arguments.sp:
        print(row(sp_size, arguments.tokens, arguments.turns), flush=True)


if __name__ == "__main__":
    main()
