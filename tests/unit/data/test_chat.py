"""Labels written out by hand for each kind of template."""

from __future__ import annotations

from typing import Any

import pytest

from ds_ulysses.config.constants import IGNORE_INDEX
from ds_ulysses.data.chat import tokenize_chat
from tests.tokenizers import CHATML, MARKED, NEXT_ROLE, PLAIN, THINKING, word_tokenizer

CHAT = [
    {"role": "user", "content": "hi a"},
    {"role": "assistant", "content": "hello there"},
    {"role": "user", "content": "what is b"},
    {"role": "assistant", "content": "one two three"},
]


def supervised(row: dict[str, Any], template: str | None, max_length: int = 100) -> str:
    """The sample with unsupervised tokens in brackets."""
    tokenizer = word_tokenizer(template)
    sample = tokenize_chat(row, tokenizer, max_length)
    assert all(label in (token, IGNORE_INDEX) for token, label in zip(*sample.values(), strict=True))
    words = [tokenizer.convert_ids_to_tokens(i).replace("\n", "|") for i in sample["input_ids"]]
    return " ".join(f"[{w}]" if label == IGNORE_INDEX else w for w, label in zip(words, sample["labels"], strict=True))


TURNS = (
    "[<|im_start|>] [user] [|] [hi] [a] [<|im_end|>] [|] [<|im_start|>] [assistant] [|] hello there <|im_end|> [|] "
    "[<|im_start|>] [user] [|] [what] [is] [b] [<|im_end|>] [|] [<|im_start|>] [assistant] [|] "
)


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["unmarked", "marked"])
def test_what_the_assistant_says_and_the_token_that_ends_it(template: str) -> None:
    assert supervised({"messages": CHAT}, template) == TURNS + "one two three <|im_end|> [|]"


def test_turns_closed_by_the_next_role_and_the_last_by_the_end_token() -> None:
    assert supervised({"messages": CHAT}, NEXT_ROLE) == (
        "[<|user|>] [hi] [a] [<|assistant|>] hello there <|user|> [what] [is] [b] [<|assistant|>] one two three </s>"
    )


def test_a_template_that_renders_the_last_turn_in_another_way() -> None:
    assert supervised({"messages": CHAT}, THINKING) == (TURNS + "<think> | | </think> | | one two three <|im_end|> [|]")


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["unmarked", "marked"])
def test_a_cut_inside_an_answer_keeps_what_is_before_it(template: str) -> None:
    full = supervised({"messages": CHAT}, template).split()
    for length in (26, 28, 29, 30):
        assert supervised({"messages": CHAT}, template, length).split() == full[:length]


def test_the_end_token_stays_where_it_fits() -> None:
    length = len(supervised({"messages": CHAT}, CHATML).split()) - 1  # all but the line break after it
    assert supervised({"messages": CHAT}, CHATML, length).endswith("three <|im_end|>")


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["unmarked", "marked"])
def test_prompt_and_completion_chats_have_loss_on_the_completion_only(template: str) -> None:
    row = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    expected = TURNS.replace("hello there <|im_end|>", "[hello] [there] [<|im_end|>]") + "one two three <|im_end|> [|]"
    assert supervised(row, template) == expected


def test_plain_prompt_and_completion() -> None:
    assert supervised({"prompt": "what is a", "completion": " long answer"}, None) == (
        "[what] [is] [a] long answer <|im_end|>"
    )


def test_words_of_the_user_that_look_like_the_assistants() -> None:
    chat = [
        {"role": "system", "content": "assistant"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "<|im_start|>assistant\na"},
        {"role": "assistant", "content": "user"},
    ]
    assert supervised({"messages": chat}, CHATML) == (
        "[<|im_start|>] [system] [|] [assistant] [<|im_end|>] [|] [<|im_start|>] [user] [|] [a] [<|im_end|>] [|] "
        "[<|im_start|>] [assistant] [|] a <|im_end|> [|] [<|im_start|>] [user] [|] [<|im_start|>] [assistant] [|] [a] "
        "[<|im_end|>] [|] [<|im_start|>] [assistant] [|] user <|im_end|> [|]"
    )


def test_an_empty_answer_teaches_to_end() -> None:
    chat = [CHAT[0], {"role": "assistant", "content": ""}]
    assert supervised({"messages": chat}, CHATML).endswith("[assistant] [|] <|im_end|> [|]")


def test_a_chat_that_ends_with_the_user_is_not_closed_for_it() -> None:
    assert supervised({"messages": CHAT[:3]}, NEXT_ROLE).endswith("hello there <|user|> [what] [is] [b]")


def test_a_template_without_special_tokens() -> None:
    """The end token closes the last turn if the assistant has it, and only then."""
    answered = "[user] [:] [hi] [a] [|] [assistant] [:] hello there"
    assert supervised({"messages": CHAT[:2]}, PLAIN) == f"{answered} <|im_end|>"
    assert supervised({"messages": CHAT[:3]}, PLAIN) == f"{answered} [|] [user] [:] [what] [is] [b] [|]"


SHOUTING = CHATML.replace("m['content']", "m['content'] | upper")
FAULTS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"text": "hi"}, CHATML, "A row has text: expected `messages`"),
    ({"prompt": "hi", "completion": CHAT}, CHATML, "expected `messages`"),
    ({"messages": [{"role": "user"}]}, CHATML, "must have `role` and a text `content`"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, CHATML, "must have `role` and a text"),
    ({"messages": CHAT}, None, "no chat template"),
    ({"messages": CHAT}, SHOUTING, "does not show the words of the message 'hi a'"),
]


@pytest.mark.parametrize(("row", "template", "message"), FAULTS, ids=lambda x: str(x)[:20])
def test_rows_and_templates_that_cannot_be_used(row: dict[str, Any], template: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenize_chat(row, word_tokenizer(template), 100)
