"""The token ids of a session, kept by the server: what a request repeats is not rendered or tokenised again.

A client sends the whole conversation with every request, and a chat template renders it otherwise than the model wrote
it: it drops thoughts, strips texts, reorders JSON. Then no prompt continues the tokens before it. So `History` looks
for the longest known conversation at the head of a request's messages, and the next prompt is that conversation's ids
and the tokens of what is new. Messages match whatever a client did to their thoughts, ids, outer whitespace and the
order of JSON keys. What continues no known conversation is rendered as a whole: an explicit branch.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import Any

from slime.agent.trajectory import Message, TurnRecord
from slime.rollout.multi_turn import count_drift, next_turn_tokens
from slime.utils.processing_utils import encode_text, render_chat

logger = logging.getLogger(__name__)
Tools = list[dict[str, Any]] | None
MODES = ("append", "render")


@dataclass(frozen=True)
class Prompt:
    """A request as the engine gets it.

    Attributes:
        ids: token ids.
        messages: the request's, those that are known as they were first recorded.
    """

    ids: list[int]
    messages: list[Message]


@dataclass(frozen=True)
class _Known:
    messages: list[Message]
    turn: TurnRecord

    @property
    def ids(self) -> list[int]:
        return [*self.turn.prompt_ids, *self.turn.output_ids]


class History:
    """The conversations of one session that the engine took part in."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Known] = {}

    def prompt(self, tokenizer: Any, messages: list[Message], tools: Tools, *, appends: bool) -> Prompt:
        """Make the prompt of a request.

        Args:
            tokenizer: with a chat template.
            messages: the whole conversation.
            tools: chat tools; others than those of the known conversation make it another one.
            appends: False has the tokenizer render everything.
        """
        known, count = self._find(messages, tools)
        new = messages[count:]
        if known is None:
            return Prompt(render(tokenizer, messages, tools), messages)
        canonical = [*known.messages, *new]
        if appends and (tokens := self._continued(tokenizer, known, new, tools)) is not None:
            return Prompt(tokens, canonical)
        return Prompt(render(tokenizer, messages, tools), canonical)

    def _find(self, messages: list[Message], tools: Tools) -> tuple[_Known | None, int]:
        digests = _digests(messages[:-1], tools)
        for count in range(len(digests), 0, -1):
            if (known := self._known.get(digests[count - 1])) is not None:
                return known, count
        return None, 0

    def _continued(self, tokenizer: Any, known: _Known, new: list[Message], tools: Tools) -> list[int] | None:
        # The head is enough: what a template writes behind an assistant's turn depends on what follows it.
        first_user = next((i for i, m in enumerate(known.messages) if m["role"] == "user"), 0)
        head = [m for m in known.messages[: first_user + 1] if m["role"] != "assistant"]
        so_far = [*head, {"role": "assistant", "content": ""}]
        try:
            ids = known.ids
            return [*ids, *next_turn_tokens(tokenizer, so_far, new, tokens=ids, tools=tools)]
        except ValueError as error:  # a template that wants calls before what tools say, or shows no such turn
            logger.warning("the session is rendered as a whole, which may begin a new sample: %s", error)
            return None

    def add(self, messages: list[Message], tools: Tools, answer: Message, turn: TurnRecord) -> None:
        """Remember a conversation that ends with the model's answer; of two with equal messages the first is kept."""
        conversation = [*messages, answer]
        self._known.setdefault(_digests(conversation, tools)[-1], _Known(conversation, turn))


def _digests(messages: list[Message], tools: Tools) -> list[bytes]:
    """For each message the digest of the conversation up to it."""
    digest = hashlib.blake2b(_json(tools or []), digest_size=16).digest()
    digests = []
    for message in messages:
        digest = hashlib.blake2b(digest + _canonical(message), digest_size=16).digest()
        digests.append(digest)
    return digests


def _canonical(message: Message) -> bytes:
    """Return the parts that equal messages share: role, text without thoughts, calls."""
    text = str(message.get("content") or "")
    if message["role"] == "assistant":
        text = text.rpartition("</think>")[2]
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    said = [message["role"], text.strip(), [[call.get("name"), call.get("arguments")] for call in calls]]
    return _json(said)


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def has_template(tokenizer: Any) -> bool:
    """Return whether a tokenizer can render the tokens of new messages alone."""
    return bool(getattr(tokenizer, "chat_template", None))


def render(tokenizer: Any, messages: list[Message], tools: Tools) -> list[int]:
    """Token ids of a whole conversation and the generation prompt, by the tokenizer's chat template.

    Raises:
        UsageError: the template refuses the messages.
    """
    if has_template(tokenizer):
        return encode_text(tokenizer, render_chat(tokenizer, messages, tools=tools))
    ids = tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, add_generation_prompt=True)
    return list(ids if isinstance(ids, list) else ids["input_ids"])


def drift(tokenizer: Any, messages: list[Message], tools: Tools, ids: list[int]) -> int:
    """By how many tokens the template's rendering of a conversation differs from its ids; 0 without a template."""
    try:
        return count_drift(tokenizer, messages, tokens=ids, tools=tools) if has_template(tokenizer) else 0
    except ValueError as error:
        logger.warning("template drift could not be measured: %s", error)
        return 0
