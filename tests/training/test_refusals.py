"""Models that would not be exact are refused by name, layer and reason; by the trainer too, at once, with code 1."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from ds_ulysses.models.support import SETTINGS, STRUCTURE, refuse_unsupported_model
from tests.distributed import run_ranks

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip
STATE = "carries a state from token to token"
SECONDS = 10.0
"""Refusals are said to come in seconds; most of it is what transformers takes to read a config."""


class Refused(NamedTuple):
    config: str
    said: str
    """Pattern: the model's name, the layer or field, the reason."""
    changes: Mapping[str, Any] = MappingProxyType({})


REFUSED = [
    Refused("T5Config", "t5 model.*cross-attention.*attends to a second sequence"),
    Refused("BartConfig", "bart model.*cross-attention.*attends to a second sequence"),
    Refused("WhisperConfig", "whisper model.*is_encoder_decoder=True"),
    Refused("GPT2Config", "gpt2 model.*add_cross_attention=True.*second sequence", {"add_cross_attention": True}),
    Refused("LlavaConfig", "llava model.*sub-models text_config, vision_config.*only text models"),
    Refused("Gemma3Config", "gemma3 model.*sub-models text_config, vision_config.*only text models"),
    Refused("MllamaConfig", "mllama model.*sub-models"),
    Refused("Qwen3NextConfig", f"qwen3_next model.*layer 0 is linear_attention .3 of 4 layers.*{STATE}", TINY),
    Refused("MiniMaxConfig", f"minimax model.*is linear_attention.*{STATE}", TINY),
    Refused("KimiLinearConfig", f"kimi_linear model.*is linear_attention.*{STATE}"),
    Refused("MambaConfig", f"mamba model.*layer 0 is linear_attention.*{STATE}"),
    Refused("Mamba2Config", f"mamba2 model.*layer 0 is linear_attention.*{STATE}"),
    Refused("BambaConfig", f"bamba model.*layer 0 is linear_attention.*{STATE}"),
    Refused("JambaConfig", f"jamba model.*layer 0 is linear_attention.*{STATE}"),
    Refused("FalconH1Config", f"falcon_h1 model.*layer 0 is hybrid.*{STATE}"),
    Refused("Zamba2Config", f"zamba2 model.*{STATE}"),
    Refused("RecurrentGemmaConfig", f"recurrent_gemma model.*layer 0 is linear_attention.*{STATE}"),
    Refused("RwkvConfig", f"rwkv model.*layer 0 is recurrent.*{STATE}"),
    Refused("xLSTMConfig", f"xlstm model.*layer 0 is recurrent.*{STATE}"),
    Refused("Lfm2Config", "lfm2 model.*layer 0 is conv .2 of 4.*mixes neighbouring tokens",
            {**TINY, "layer_types": ["conv", "full_attention"] * 2}),
    Refused("Llama4TextConfig", "llama4_text model.*is chunked_attention.*chunks of the sequence"),
    Refused("BertConfig", "bert model.*has not been tested. Tested are: llama"),
    Refused("BloomConfig", "bloom model.*has not been tested"),
    Refused("LlamaConfig", "llama model.*attention_dropout=0.1", {**TINY, "attention_dropout": 0.1}),
    Refused("GPT2Config", "gpt2 model.*attn_pdrop=0.1.*Set it to 0 in the model's config"),
    Refused("MixtralConfig", "mixtral model.*router_jitter_noise=0.1", {**TINY, "router_jitter_noise": 0.1}),
    Refused("LlamaConfig", "llama model.*layer_types moe.*only full_attention", {**TINY, "layer_types": ["moe"] * 4}),
]  # fmt: skip


def config_of(refused: Refused) -> Any:
    import transformers

    return getattr(transformers, refused.config)(**refused.changes)


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.config)
def test_refused_by_name(refused: Refused) -> None:
    with pytest.raises(ValueError, match=refused.said):
        refuse_unsupported_model(config_of(refused))


def test_every_obstacle_is_tried() -> None:
    configs = [config_of(refused) for refused in REFUSED]
    assert all(any(obstacle.applies(config) for config in configs) for obstacle in STRUCTURE + SETTINGS)


def check_trainer(folders: dict[str, Path], config: str) -> dict[str, tuple[object, float]]:
    """What `sft.py` exits with for each model, and after how many seconds."""
    from train.sft import main

    found: dict[str, tuple[object, float]] = {}
    for name, folder in folders.items():
        sys.argv = ["sft.py", "--model_name_or_path", str(folder), "--dataset", "missing.jsonl", "--deepspeed", config,
                    "--output_dir", str(folder / "out")]  # fmt: skip
        begun = time.monotonic()
        with pytest.raises(SystemExit) as stopped:
            main()
        found[name] = stopped.value.code, time.monotonic() - begun
    return found


def test_the_trainer_refuses_before_it_reads_data(tmp_path: Path) -> None:
    """On both ranks, by the same words. A text as exit code is printed, and the process ends with 1."""
    config = tmp_path / "deepspeed.json"
    config.write_text('{"sequence_parallel_size": 2, "train_micro_batch_size_per_gpu": 1}')
    for index, refused in enumerate(REFUSED):
        config_of(refused).save_pretrained(tmp_path / str(index))
    folders = {str(index): tmp_path / str(index) for index in range(len(REFUSED))}
    for rank, found in enumerate(run_ranks(check_trainer, 2, folders, str(config))):
        for index, refused in enumerate(REFUSED):
            said, seconds = found[str(index)]
            assert isinstance(said, str)
            assert said.startswith(f"rank {rank}: ")
            assert re.search(refused.said, said), said
            assert seconds < SECONDS
