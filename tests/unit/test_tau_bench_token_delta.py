"""examples/tau-bench/token_delta.py: what a message adds, where templates rewrite history and tokens join."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "examples" / "tau-bench" / "token_delta.py"
SPEC = importlib.util.spec_from_file_location("tau_bench_token_delta", PATH)
token_delta = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(token_delta)
get_token_delta = token_delta.get_token_delta
PROMPT = "[assistant]"


class Tokenizer:
    """One token per character, its code point; "]H" is one token, 1, where both are in a text.

    Args:
        shows: what of an assistant's message is shown, before and after a later user's message.
    """

    def __init__(self, shows=lambda text, is_past: text) -> None:
        self.shows = shows

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize=False) -> str:
        assert tokenize is False
        last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        texts = [
            self.shows(m["content"], i < last_user) if m["role"] == "assistant" else m["content"]
            for i, m in enumerate(messages)
        ]
        turns = [f"[{m['role']}]{text}|" for m, text in zip(messages, texts, strict=True)]
        return "".join(turns) + (PROMPT if add_generation_prompt else "")

    def encode(self, text, *, add_special_tokens=False) -> list[int]:
        assert add_special_tokens is False
        return [ord(character) for character in text.replace("]H", "\1")]

    def decode(self, ids) -> str:
        return "".join(map(chr, ids)).replace("\1", "]H")


def say(*contents: str) -> list[dict[str, str]]:
    """A conversation that a user begins."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def without_past_thoughts(text: str, is_past: bool) -> str:
    return text.rpartition("</think>")[2] if is_past else text


def test_an_assistants_text_behind_the_generation_prompt_is_trained():
    tokenizer = Tokenizer()
    ids, mask = get_token_delta(tokenizer, say("hi", "yes"))
    assert tokenizer.decode(ids) == "yes|" and mask == [1] * 4


def test_the_generation_prompt_is_untrained_and_tokenised_by_itself():
    tokenizer = Tokenizer()
    ids, mask = get_token_delta(tokenizer, say("hi", "Hello"), include_generation_prompt=True)
    prompt = tokenizer.encode(PROMPT)
    assert tokenizer.encode(PROMPT + "Hello|") != prompt + tokenizer.encode("Hello|"), "a token joins here"
    assert ids == prompt + tokenizer.encode("Hello|")
    assert mask == [0] * len(prompt) + [1] * len("Hello|")


def test_a_user_after_whom_earlier_thoughts_are_dropped_adds_the_message_alone():
    tokenizer = Tokenizer(without_past_thoughts)
    ids, mask = get_token_delta(tokenizer, say("hi", "<think>so</think>yes", "and?"))
    assert tokenizer.decode(ids) == "[user]and?|" and mask == [0] * len(ids)


@pytest.mark.parametrize("shows", [lambda text, is_past: text, without_past_thoughts])
def test_six_turns_of_a_user_add_up_with_every_boundary_once(shows):
    tokenizer = Tokenizer(shows)
    contents = [text for number in range(6) for text in (f"q{number}", f"<think>t</think>a{number}")]
    messages, ids, trained = say(*contents), [], []
    for end in range(1, len(messages) + 1):
        more, mask = get_token_delta(tokenizer, messages[:end], include_generation_prompt=True)
        ids += more
        trained += [token for token, bit in zip(more, mask, strict=True) if bit]
    whole = "".join(f"[{m['role']}]{m['content']}|" for m in messages)
    assert tokenizer.decode(ids) == whole, "each turn as it was when it was the last"
    assert tokenizer.decode(trained) == "".join(f"{text}|" for text in contents[1::2])


def test_no_messages_and_other_rewrites_of_history_are_errors():
    with pytest.raises(ValueError, match="at least one message"):
        get_token_delta(Tokenizer(), [])
    numbered = Tokenizer()
    plain = numbered.apply_chat_template
    numbered.apply_chat_template = lambda messages, **flags: f"{len(messages)}:{plain(messages, **flags)}"
    for messages in (say("hi", "yes"), say("hi", "yes", "and?"), [*say("hi"), {"role": "tool", "content": "1"}]):
        with pytest.raises(ValueError, match="shows the conversation otherwise"):
            get_token_delta(numbered, messages)
