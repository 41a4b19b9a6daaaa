"""From a folder or a name to a config, a tokenizer and a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import AutoPeftModelForCausalLM
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ds_ulysses.config import torch_dtype


def load_model_config(name: str) -> Any:
    """Load the config of a model by folder or name. Raises `ValueError`."""
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"Cannot load the model {name!r}: {error}") from error


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a model by folder or name. Raises `ValueError`."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"Cannot load the tokenizer of {name!r}: {error}") from error


def load_model(name: str, dtype: str, config: Any = None) -> Any:
    """Load a causal LM with its weights, cast to `dtype` (fp32, bf16, ...); by its own config, or by that one."""
    given = {} if config is None else {"config": config}
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch_dtype(dtype), **given)


def random_model(config: Any, dtype: str) -> Any:
    """Make a causal LM by its config, with the weights that transformers draws."""
    return AutoModelForCausalLM.from_config(config, dtype=torch_dtype(dtype))


def answer(folder: str, question: str, max_new_tokens: int = 80) -> str:
    """Return the most likely answer of a saved chat model or adapter, cut at `max_new_tokens`."""
    has_adapter = (Path(folder) / "adapter_config.json").exists()
    model = (AutoPeftModelForCausalLM if has_adapter else AutoModelForCausalLM).from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)
    return str(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
