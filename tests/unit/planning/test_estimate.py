"""`ds-ulysses plan` against runs that others have published, and what it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ds_ulysses import SequenceParallelConfig
from ds_ulysses.commands.main import main
from ds_ulysses.placement.mesh import Machine, choose_mesh
from ds_ulysses.planning.estimate import GIB, Hardware, ModelShape, Setup, longest_row, memory, sent, step_time
from ds_ulysses.planning.sizing import shape_of
from ds_ulysses.training.arguments import SftArguments
from ds_ulysses.training.auto_values import fill_from_arguments
from tests.models import ARCHITECTURES, tiny_model

LLAMA_8B = ModelShape(8_030_261_248, 7_504_924_672, 32, 4096, 14336, 32, 8, 128, 128256)
K, M = 2**10, 2**20


def setup(tokens: int, sp_size: int, num_ranks: int = 8, strategy: str = "ulysses") -> Setup:
    config = SequenceParallelConfig(sequence_parallel_size=sp_size, strategy=strategy)
    return Setup(num_ranks, tokens, choose_mesh(config, Machine(8, (32, 8))))


@pytest.mark.parametrize(("sp_size", "published"), [(1, 160 * K), (8, 1.1 * M)])
def test_longest_rows_are_within_15_percent_of_published_ones(sp_size: int, published: float) -> None:
    """Llama-8B on 8 H100: "Arctic Long Sequence Training" (arXiv:2506.13996), table of features: with the tiled loss,
    and with Ulysses besides."""
    assert longest_row(LLAMA_8B, setup(0, sp_size), Hardware()) == pytest.approx(published, rel=0.15)


QWEN3_32B = ModelShape(32_762_123_264, 31_983_534_080, 64, 5120, 25600, 64, 8, 128, 151936)
PUBLISHED: list[tuple[str, ModelShape, int, dict[int, int]]] = [
    ("ulysses", LLAMA_8B, 8, {128 * K: 2320, 256 * K: 1504, 512 * K: 879, 1 * M: 475, 2 * M: 246, 3 * M: 162}),
    ("ring", LLAMA_8B, 8, {128 * K: 2065, 256 * K: 1388, 512 * K: 841, 1 * M: 459, 2 * M: 238, 3 * M: 160}),
    ("ulysses", QWEN3_32B, 16, {128 * K: 545, 1 * M: 117, 2 * M: 60}),
]


@pytest.mark.parametrize(("strategy", "model", "num_ranks", "rates"), PUBLISHED, ids=lambda x: str(x)[:12])
def test_tokens_per_second_are_within_20_percent_of_published_ones(
    strategy: str, model: ModelShape, num_ranks: int, rates: dict[int, int]
) -> None:
    """Tokens a second and GPU on H100: "Untied Ulysses" (arXiv:2602.21196), its rows of Ulysses and of the ring."""
    times = {t: step_time(model, setup(t, num_ranks, num_ranks, strategy), Hardware()) for t in rates}
    found = {tokens: tokens / num_ranks / sum(parts.values()) for tokens, parts in times.items()}
    assert found == pytest.approx(rates, rel=0.2)


def test_memory_is_cut_by_what_cuts_it() -> None:
    parts = [memory(LLAMA_8B, replace(setup(M, 8), zero_stage=stage)) for stage in range(4)]
    for stage, name, bytes_each in ((1, "optimizer", 12), (2, "gradients", 4), (3, "weights", 2)):
        for at, part in enumerate(parts):
            assert part[name] == bytes_each * LLAMA_8B.num_weights / (8 if at >= stage else 1)
    assert memory(LLAMA_8B, replace(setup(M, 8), offload=True))["optimizer"] == 0
    half = memory(LLAMA_8B, setup(M // 2, 8))["kept activations"]
    assert memory(LLAMA_8B, setup(M, 8))["kept activations"] == 2 * half == 32 * GIB


@pytest.mark.parametrize("sp_size", [1, 2, 8])
def test_the_longest_row_just_fits(sp_size: int) -> None:
    limit = longest_row(LLAMA_8B, setup(0, sp_size), Hardware())
    for tokens, fits in ((limit, True), (int(limit * 1.001), False)):
        assert (sum(memory(LLAMA_8B, setup(tokens, sp_size)).values()) <= Hardware().memory) == fits
    assert longest_row(LLAMA_8B, setup(0, sp_size), Hardware(memory=20 * GIB)) == 0


def test_links_between_nodes_are_slower() -> None:
    near, far = (
        step_time(LLAMA_8B, setup(M, 16, 16, "ulysses"), Hardware(gpus_per_node=n))["exchange"] for n in (16, 8)
    )
    assert far == pytest.approx(near * 300 / 45)
    assert set(sent(LLAMA_8B, setup(M, 8, strategy="ring"))) == {"ring"}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "deepseek_v3"])
def test_shape_of_a_config(kind: str) -> None:
    model = tiny_model(kind, **ARCHITECTURES[kind])
    shape = shape_of(model.config)
    assert shape.num_weights == sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    tables = ("embed", "wte", "wpe")
    others = sum(p.numel() for name, p in model.named_parameters() if p.dim() < 2 or any(x in name for x in tables))
    assert shape.num_active == shape.num_weights - others - experts / 2  # 2 of 4 experts, where there are any
    assert (shape.num_layers, shape.num_heads) == (2, 4)


def test_the_page_and_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model().config.save_pretrained(tmp_path)
    command = ["plan", "--model", str(tmp_path), "--seq", "128K", "--gpus", "4", "--gpu_memory"]
    main([*command, "3.045", "--out", str(tmp_path / "ds.json")])
    page = capsys.readouterr().out
    assert "rows of 131,072 tokens on 4 GPUs of 3.0 GiB" in page
    assert "Best: 4 ranks a sequence, 1 replicas" in page
    assert "does not fit" in page
    assert "most of what longer ones would add" in page
    config = json.loads((tmp_path / "ds.json").read_text())
    arguments = SftArguments(model_name_or_path="m", dataset=["d"], deepspeed="z", output_dir="o", bf16=True)
    filled = fill_from_arguments(config, arguments, world_size=4)
    assert SequenceParallelConfig.from_deepspeed(filled).sequence_parallel_size == 4
    with pytest.raises(SystemExit, match="1"):
        main([*command, "2"])
    assert "Nothing fits. 4 GPUs hold at most 0 tokens: take more of them." in capsys.readouterr().out


def test_a_model_that_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    from transformers import BambaConfig

    BambaConfig().save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="bamba model cannot be trained"):
        main(["plan", "--model", str(tmp_path), "--seq", "1M", "--gpus", "8"])
