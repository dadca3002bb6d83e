"""The token ids of a session, kept by the server: what a request repeats is not rendered or tokenised again.

A client sends the whole conversation with every request, and a chat template renders it otherwise than the model wrote
it: it drops thoughts, strips texts, reorders JSON. Then no prompt continues the tokens before it. So `History` looks
for the longest known conversation at the head of a request's messages, and the next prompt is that conversation's ids
and the tokens of what is new. Messages match whatever a client did to their thoughts, ids, outer whitespace and the
order of JSON keys. What continues no known conversation is rendered as a whole: an explicit branch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slime.agent.trajectory import Message, TurnRecord
from slime.rollout.multi_turn import count_drift, next_turn_tokens
from slime.utils.processing_utils import encode_text, render_chat

logger = logging.getLogger(__name__)
Tools = list[dict[str, Any]] | None
MODES = ("append", "render")
_SHORT_CHARS = 1 << 16  # of new texts, whose tokens are made in less time than a thread takes to be woken
_HEAD_CHARS = 200


@dataclass(frozen=True)
class Prompt:
    """A request as the engine gets it.

    Attributes:
        ids: token ids.
        messages: the request's, those that are known as they were first recorded.
        digest: of the messages and the tools.
        before: the turn whose prompt and output the ids begin with; None where they were rendered.
    """

    ids: Sequence[int]
    messages: list[Message]
    digest: bytes = b""
    before: TurnRecord | None = None


class SharedIds(Sequence[int]):
    """The first `length` ids of an array that grows: the prompts of a conversation's turns share one.

    A list of its own for each prompt would take turns x context of memory.
    """

    def __init__(self, held: array[int], ids: Sequence[int]) -> None:
        self._held, self._length = held, len(ids)
        self._latest: list[int] | None = list(ids)  # of the last turn alone: the next prompt begins with it

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: Any) -> Any:
        if self._latest is not None:
            return self._latest[place]
        if isinstance(place, slice):
            start, stop, step = place.indices(self._length)
            return self._held[start:stop:step].tolist()
        return self._held[range(self._length)[place]]

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == list(other)

    __hash__ = None  # type: ignore[assignment]

    def grown(self, ids: Sequence[int]) -> SharedIds:
        """Longer ids that begin with these: in the same array, unless another conversation has gone on from there."""
        self._latest = None
        if len(self._held) != self._length:
            return SharedIds(array("i", ids), ids)
        self._held.extend(ids[self._length :])
        return SharedIds(self._held, ids)


@dataclass(frozen=True)
class _Known:
    messages: list[Message]
    turn: TurnRecord


@dataclass(frozen=True)
class Match:
    """A request, and what of it is known.

    Attributes:
        messages: the whole conversation.
        tools: chat tools; others than those of the known conversation make it another one.
        known: the longest known conversation at its head; None where there is none.
        new: the messages behind it.
        digest: of the messages and the tools.
    """

    messages: list[Message]
    tools: Tools
    known: _Known | None
    new: list[Message]
    digest: bytes

    @property
    def is_short(self) -> bool:
        """Whether little is new, so that its tokens cost less than another thread does."""
        return self.known is not None and sum(len(str(m.get("content") or "")) for m in self.new) < _SHORT_CHARS


class History:
    """The conversations of one session that the engine took part in."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Known] = {}
        self._last: tuple[list[Message], list[bytes], Tools] = [], [], None

    def match(self, messages: list[Message], tools: Tools) -> Match:
        """Find the longest known conversation at the head of a request's."""
        digests = self._digests(messages, tools)
        for count in range(len(messages) - 1, 0, -1):
            if (known := self._known.get(digests[count - 1])) is not None:
                return Match(messages, tools, known, messages[count:], digests[-1])
        return Match(messages, tools, None, messages, digests[-1])

    def _digests(self, messages: list[Message], tools: Tools) -> list[bytes]:
        """`_digests`, those taken over that the request before has left: comparing is cheap."""
        last, digests, last_tools = self._last
        same = 0
        if tools == last_tools:
            for old, message in zip(last, messages, strict=False):
                if old != message:
                    break
                same += 1
        found = [*digests[:same], *_digests(messages[same:], tools, after=digests[same - 1] if same else None)]
        self._last = messages, found, tools
        return found

    def prompt(self, tokenizer: Any, match: Match, *, appends: bool) -> Prompt:
        """Make the prompt of a request.

        Args:
            tokenizer: with a chat template.
            match: of `self.match`.
            appends: False has the tokenizer render everything.
        """
        messages, known = match.messages, match.known
        if known is None:
            return Prompt(render(tokenizer, messages, match.tools), messages, match.digest)
        canonical = [*known.messages, *match.new]
        if appends and (tokens := self._continued(tokenizer, known, match.new, match.tools)) is not None:
            return Prompt(tokens, canonical, match.digest, before=known.turn)
        return Prompt(render(tokenizer, messages, match.tools), canonical, match.digest)

    def _continued(self, tokenizer: Any, known: _Known, new: list[Message], tools: Tools) -> list[int] | None:
        # A short head is enough: what a template writes behind an assistant's turn depends on what follows it.
        first_user = next((i for i, m in enumerate(known.messages) if m["role"] == "user"), 0)
        head = [_cut(m) for m in known.messages[: first_user + 1] if m["role"] != "assistant"]
        so_far = [*head, {"role": "assistant", "content": ""}]
        try:
            ids = [*known.turn.prompt_ids[:], *known.turn.output_ids]
            ids += next_turn_tokens(tokenizer, so_far, new, tokens=ids, tools=tools)
            return ids
        except ValueError as error:  # a template that wants calls before what tools say, or shows no such turn
            logger.warning("the session is rendered as a whole, which may begin a new sample: %s", error)
            return None

    def add(self, prompt: Prompt, answer: Message, turn: TurnRecord) -> None:
        """Remember a conversation that ends with the model's answer; of two with equal messages the first is kept."""
        known = _Known([*prompt.messages, answer], turn)
        self._known.setdefault(_next(prompt.digest, answer), known)


def shared(prompt: Prompt, turn: TurnRecord) -> TurnRecord:
    """A turn to be kept: its prompt's ids shared with the turn before it."""
    before = prompt.before.prompt_ids if prompt.before else SharedIds(array("i"), [])
    ids = before.grown(turn.prompt_ids) if isinstance(before, SharedIds) else turn.prompt_ids
    return dataclasses.replace(turn, prompt_ids=ids)


def _cut(message: Message) -> Message:
    """A message with the beginning and the end of its text."""
    text = message.get("content")
    if not isinstance(text, str) or len(text) <= 2 * _HEAD_CHARS:
        return message
    return {**message, "content": text[:_HEAD_CHARS] + text[-_HEAD_CHARS:]}


def _digests(messages: list[Message], tools: Tools, *, after: bytes | None = None) -> list[bytes]:
    """For each message the digest of the conversation up to it; `after` is that of the messages before."""
    digest = after or hashlib.blake2b(_json(tools or []), digest_size=16).digest()
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
