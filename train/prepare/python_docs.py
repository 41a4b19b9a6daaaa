"""Turn Python's own reference documentation, which ships in `pydoc_data.topics`, into long chats.

    python -m train.prepare.python_docs OUTPUT.jsonl

A topic has 200 to 62,000 characters. Long ones are one question and answer; short ones are asked after in one chat
until it is long too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

MIN_CHARACTERS = 10_000
"""Of a chat: with SmolLM2's tokenizer, 2,048 tokens and more."""


def chats() -> Iterator[dict[str, list[dict[str, str]]]]:
    """Chats in the order of the topics' names; the last, which may stay short, is joined to none."""
    messages: list[dict[str, str]] = []
    for name, text in sorted(topics.items()):
        messages += [
            {"role": "user", "content": f'What does the Python language reference say about "{name}"?'},
            {"role": "assistant", "content": text.strip()},
        ]
        if sum(len(message["content"]) for message in messages) >= MIN_CHARACTERS:
            yield {"messages": messages}
            messages = []


def write(output: Path) -> None:
    """Write one JSON object per line."""
    output.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats()]
    output.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
