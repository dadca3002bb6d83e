"""The tokens that the last message of a conversation adds, and which of them are trained.

For conversations that exist as messages only. Where an engine wrote the answer its own tokens are to be trained:
`slime.rollout.multi_turn` keeps those, and `next_turn_tokens` there appends what others say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def get_token_delta(
    tokenizer: Any, messages: Sequence[dict[str, Any]], *, include_generation_prompt: bool = False
) -> tuple[list[int], list[int]]:
    """What the last message adds to the conversation before it.

    Args:
        tokenizer: with `apply_chat_template` and `encode`.
        messages: the last one is an assistant's, whose text is trained, or another one, which is not.
        include_generation_prompt: put the generation prompt, untrained, in front of an assistant's text. It is
            tokenised by itself, as the engine has seen it.

    Returns:
        (token ids [T], mask [T]).

    Raises:
        ValueError: there is no message, or the chat template shows the messages before it otherwise with it.
    """
    if not messages:
        raise ValueError("get_token_delta needs at least one message")
    *before, last = messages
    whole, shown = _render(tokenizer, messages), _render(tokenizer, before) if before else ""
    if last["role"] != "assistant":
        ids = _encode(tokenizer, _added(tokenizer, whole, shown, last))
        return ids, [0] * len(ids)
    prompted = _render(tokenizer, before, add_generation_prompt=True)
    if not whole.startswith(prompted) or not prompted.startswith(shown):
        raise ValueError("the chat template shows the conversation otherwise once the assistant's message is there")
    ids = _encode(tokenizer, whole[len(prompted) :])
    prompt = _encode(tokenizer, prompted[len(shown) :]) if include_generation_prompt else []
    return [*prompt, *ids], [0] * len(prompt) + [1] * len(ids)


def _added(tokenizer: Any, whole: str, shown: str, last: dict[str, Any]) -> str:
    """The text of a message that is no assistant's."""
    if whole.startswith(shown):
        return whole[len(shown) :]
    # A template that drops earlier thoughts once a user speaks: the message itself is shown as ever.
    alone = _render(tokenizer, [last]) if last["role"] == "user" else ""
    if alone and whole.endswith(alone):
        return alone
    raise ValueError(f"the chat template shows the conversation otherwise once the {last['role']}'s message is there")


def _render(tokenizer: Any, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
    return str(
        tokenizer.apply_chat_template(list(messages), add_generation_prompt=add_generation_prompt, tokenize=False)
    )


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
