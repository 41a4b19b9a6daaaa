"""Ask a chat model or an adapter that was saved by `sft.py`, with nothing but transformers and peft.

python -m train.ask MODEL_DIR "A question"
"""

from __future__ import annotations

import sys
from pathlib import Path

from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer


def answer(folder: str, question: str, max_new_tokens: int = 80) -> str:
    """The most likely answer, cut at `max_new_tokens`."""
    has_adapter = (Path(folder) / "adapter_config.json").exists()
    model = (AutoPeftModelForCausalLM if has_adapter else AutoModelForCausalLM).from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)
    return str(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    print(f"{sys.argv[2]}\n\n{answer(sys.argv[1], sys.argv[2])}")
