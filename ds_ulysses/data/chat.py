"""From a chat to tokens and labels: the loss is on what the assistant says, up to the token that ends its turn.

Templates that mark generations tell it themselves. For all others the turns are found in the rendered text: an
assistant's turn begins after the header that the template writes before a generation, and ends with its content
and the special token that follows, if one does. Tokens are mapped to the text by their character offsets.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from ds_ulysses.config import IGNORE_INDEX

Message = dict[str, str]
Sample = dict[str, list[int]]


def tokenize_chat(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Sample:
    """Return `input_ids` and `labels` of one row, cut to `max_length` tokens; labels are -100 where there is no loss.

    `row` has `messages` (a chat), or `prompt` and `completion` (both chats, or both plain text). Raises `ValueError`
    for rows of another kind, and for templates in which the assistant's words cannot be found.
    """
    if row.get("messages") is not None:
        sample = _conversation(row["messages"], 0, tokenizer)
    elif isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):
        sample = _conversation(row["prompt"] + row["completion"], len(row["prompt"]), tokenizer)
    elif isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        sample = _plain(row["prompt"], row["completion"], tokenizer)
    else:
        raise ValueError(
            f"A row has {', '.join(sorted(row))}: expected `messages`, a list of role and content, or `prompt` and "
            f"`completion`, both text or both lists of messages."
        )
    return {key: values[:max_length] for key, values in sample.items()}


def _plain(prompt: str, completion: str, tokenizer: PreTrainedTokenizerBase) -> Sample:
    before = tokenizer(prompt)["input_ids"]
    if before and before[-1] == tokenizer.eos_token_id:  # some tokenizers end every text
        before = before[:-1]
    after = [*tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return {"input_ids": before + after, "labels": [IGNORE_INDEX] * len(before) + after}


def _conversation(messages: list[Message], first: int, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """Loss on the assistant's messages from index `first` on."""
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
            raise ValueError(f"A message must have `role` and a text `content`, but is {message!r}.")
    if tokenizer.chat_template is None:
        raise ValueError("The tokenizer has no chat template. Use a chat model's, or `prompt` and `completion` text.")
    if not tokenizer.is_fast:
        raise ValueError("The tokenizer gives no character offsets, which the loss needs. Use a fast tokenizer.")
    marked = re.search(r"{%-?\s*generation\s*-?%}", tokenizer.chat_template) is not None
    return _marked(messages, first, tokenizer) if marked else _searched(messages, first, tokenizer)


def _marked(messages: list[Message], first: int, tokenizer: PreTrainedTokenizerBase) -> Sample:
    out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    supervised = list(out["assistant_masks"])
    if first:
        start = len(tokenizer.apply_chat_template(messages[:first], return_dict=True)["input_ids"])
        supervised[:start] = [0] * start
    return _sample(list(out["input_ids"]), [bool(x) for x in supervised])


def _searched(messages: list[Message], first: int, tokenizer: PreTrainedTokenizerBase) -> Sample:
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans, closed = _assistant_spans(text, messages, tokenizer)
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    kept = spans[sum(message["role"] == "assistant" for message in messages[:first]) :]
    supervised = [any(a <= start and end <= b for a, b in kept) for start, end in out["offset_mapping"]]
    ids = list(out["input_ids"])
    if not closed:
        # Nothing in the template says that the last turn has ended, so the end token does, right after its words.
        last = sum(end <= spans[-1][1] for _, end in out["offset_mapping"])
        ids, supervised = [*ids[:last], tokenizer.eos_token_id], [*supervised[:last], True]
    return _sample(ids, supervised)


def _assistant_spans(
    text: str, messages: list[Message], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[tuple[int, int]], bool]:
    """(start, end) in characters of each assistant turn; and whether the last message, if one, is closed."""
    header, ending = _generation_header(messages, tokenizer), _ending(tokenizer)
    spans, cursor, closed = [], 0, True
    for message in messages:
        speaks = message["role"] == "assistant"
        start = text.find(header, cursor) if speaks else cursor
        content = message["content"].strip()
        found = text.find(content, start + len(header) if speaks else start) if start >= 0 else -1
        if found < 0:
            raise ValueError(
                f"The chat template does not show the words of the message {content[:40]!r} as they are, so the loss "
                f"cannot be put on the assistant alone. Use a template with {{% generation %}} marks."
            )
        cursor = found + len(content)
        end = ending.match(text, cursor) if speaks else None
        closed = end is not None or not speaks
        if speaks:
            cursor = end.end() if end else cursor
            spans.append((start + len(header), cursor))
    return spans, closed


def _generation_header(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    """What the template writes between the last message and the assistant's first word; empty if nothing."""
    asked = [message for message in messages if message["role"] != "assistant"][:1] or messages[:1]
    without = tokenizer.apply_chat_template(asked, tokenize=False)
    with_header = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    return with_header[len(without) :] if with_header.startswith(without) else ""


def _ending(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """White space and then a special token, which ends a turn."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return re.compile(r"\s*(?:" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")


def _sample(ids: list[int], supervised: list[bool]) -> Sample:
    labels = [token if keep else IGNORE_INDEX for token, keep in zip(ids, supervised, strict=True)]
    return {"input_ids": ids, "labels": labels}
