"""Turn Python's own reference documentation, which ships in `pydoc_data.topics`, into chats.

    python -m train.prepare.python_docs OUTPUT.jsonl

One question and answer for each topic. A topic has 200 to 62,000 characters: few are long, most are short.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics


def chats() -> Iterator[dict[str, list[dict[str, str]]]]:
    """In the order of the topics' names."""
    for name, text in sorted(topics.items()):
        question = f'What does the Python language reference say about "{name}"?'
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": text.strip()}]}


def write(output: Path) -> None:
    """Write one JSON object per line."""
    output.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats()]
    output.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
