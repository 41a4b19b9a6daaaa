"""Turn Python's own reference documentation, which ships in `pydoc_data.topics`, into chats.

    python -m train.prepare.python_docs TRAIN.jsonl HELD_OUT.jsonl

One question and answer for each topic; every eighth is held out. A topic has 200 to 62,000 characters: few are long,
most are short.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

HELD_OUT = 8


def chats() -> list[dict[str, Any]]:
    """In the order of the topics' names."""
    question = 'What does the Python language reference say about "{}"?'
    return [
        {
            "messages": [
                {"role": "user", "content": question.format(name)},
                {"role": "assistant", "content": text.strip()},
            ]
        }
        for name, text in sorted(topics.items())
    ]


def write(rows: list[dict[str, Any]], output: Path) -> None:
    """One JSON object per line."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write([row for i, row in enumerate(chats()) if i % HELD_OUT], Path(sys.argv[1]))
    write(chats()[::HELD_OUT], Path(sys.argv[2]))
