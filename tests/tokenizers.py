"""A tokenizer of words that fits in a test, and chat templates of the three kinds there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NEXT_ROLE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# No special tokens at all: "user : hi \n assistant : hello \n".
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' \\n ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)
# A turn that thinks only when it is the last, as Qwen3's template has it.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "<pad>", "</s>"]
WORDS = "user assistant system hi ho hello there what is a b c long answer one two three four five six seven eight"


def word_tokenizer(template: str | None = CHATML) -> Any:
    """Each word, line break and special token is one token; spaces belong to no token."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", *SPECIAL, "\n", ":", "<think>", "</think>", *WORDS.split()]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\n"), "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    eos = "</s>" if template == NEXT_ROLE else "<|im_end|>"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token=eos)
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[:5]})
    fast.chat_template = template
    return fast


def tiny_checkpoint(folder: Path, **changes: Any) -> Path:
    """A folder with a tiny Llama and the word tokenizer."""
    from tests.models import tiny_model

    tiny_model(vocab_size=64, **changes).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder
