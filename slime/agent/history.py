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
        digest: of the messages and the tools.
    """

    ids: list[int]
    messages: list[Message]
    digest: bytes = b""


@dataclass(frozen=True)
class _Known:
    messages: list[Message]
    turn: TurnRecord


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
        digests = _digests(messages, tools)
        known, count = self._find(digests[:-1])
        new = messages[count:]
        if known is None:
            return Prompt(render(tokenizer, messages, tools), messages, digests[-1])
        canonical = [*known.messages, *new]
        if appends and (tokens := self._continued(tokenizer, known, new, tools)) is not None:
            return Prompt(tokens, canonical, digests[-1])
        return Prompt(render(tokenizer, messages, tools), canonical, digests[-1])

    def _find(self, digests: list[bytes]) -> tuple[_Known | None, int]:
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
            ids = [*known.turn.prompt_ids, *known.turn.output_ids]
            ids += next_turn_tokens(tokenizer, so_far, new, tokens=ids, tools=tools)
            return ids
        except ValueError as error:  # a template that wants calls before what tools say, or shows no such turn
            logger.warning("the session is rendered as a whole, which may begin a new sample: %s", error)
            return None

    def add(self, prompt: Prompt, answer: Message, turn: TurnRecord) -> None:
        """Remember a conversation that ends with the model's answer; of two with equal messages the first is kept."""
        known = _Known([*prompt.messages, answer], turn)
        self._known.setdefault(_next(prompt.digest, answer), known)


def _digests(messages: list[Message], tools: Tools) -> list[bytes]:
    """For each message the digest of the conversation up to it."""
    digest = hashlib.blake2b(_json(tools or []), digest_size=16).digest()
    return [digest := _next(digest, message) for message in messages]


def _next(digest: bytes, message: Message) -> bytes:
    """Add to a digest what equal messages share: role, text without thoughts, calls."""
    text = str(message.get("content") or "")
    if message["role"] == "assistant":
        text = text.rpartition("</think>")[2]
    said = text.strip().encode(errors="surrogatepass")
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    rest = [message["role"], len(said), [[call.get("name"), call.get("arguments")] for call in calls]]
    return hashlib.blake2b(b"".join((digest, _json(rest), said)), digest_size=16).digest()


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
