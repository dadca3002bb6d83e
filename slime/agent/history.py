"""The token ids of a session, kept by the server: what a request repeats is not rendered or tokenised again.

A client sends the whole conversation with every request, and a chat template renders it otherwise than the model wrote
it: it drops thoughts, strips texts, reorders JSON. Then no prompt continues the tokens before it. So `History` looks
for the longest known conversation at the head of a request's messages, and the next prompt is that conversation's ids
and the tokens of what is new. Messages match whatever a client did to their thoughts, ids, outer whitespace and the
order of JSON keys. What continues no known conversation is rendered as a whole: an explicit branch.
`Intake` saves the work before that: a request mostly repeats the one before, which was checked and translated already.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from slime.agent.trajectory import EXPERTS, Message, TurnRecord, without_experts
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


_FRAME = ("tools", "system", "instructions")


@dataclass(frozen=True)
class Seen:
    """A request as it came, and what was made of it: what the next one repeats costs nothing but a comparison.

    Attributes:
        path: of the request.
        frame: the fields beside the messages that chat messages and tools are made of.
        items: its messages, or the items of its input.
        frame_digest: of those fields.
        digest: of the items.
        messages: as chat templates take them.
        tools: the same of its tools.
    """

    path: str = ""
    frame: list[Any] = field(default_factory=list)
    frame_digest: bytes = b""
    items: list[Any] = field(default_factory=list)
    digest: bytes = b""
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: Any = None


class Intake:
    """A request, and how much of it is the whole of the request before.

    Args:
        seen: the session's request before.
        path: of the new one.
        body: its JSON, as it came.

    Attributes:
        num_known: items at its head that the request before had; 0 where it had others, too.
        new: the items behind them.
    """

    def __init__(self, seen: Seen, path: str, body: dict[str, Any]) -> None:
        self.seen, self.path = seen, path
        self._name = "messages" if "messages" in body else "input"
        self._items: list[Any] = body[self._name] if isinstance(body.get(self._name), list) else []
        self._frame, self._frame_digest = [body.get(name) for name in _FRAME], seen.frame_digest
        self._digest = b""
        count = len(seen.items)
        is_framed = self._frame == seen.frame
        if not is_framed:
            self._frame_digest = _hash(b"", to_json(self._frame, sorts=True))
        is_same = path == seen.path and is_framed and self._items[:count] == seen.items
        self.num_known = count if is_same and _is_apart(self._items, count) else 0
        self._items[: self.num_known] = seen.items[: self.num_known]  # their texts are held once
        self.new = self._items[self.num_known :]

    def digest(self, body: dict[str, Any]) -> bytes:
        """What equal requests share; a client may ask for a stream at first, and for a whole answer then."""
        self._digest = self.seen.digest if self.num_known else b""
        for item in self.new:
            self._digest = _hash(self._digest, to_json(item, sorts=True))
        left_out = (*_FRAME, "stream", "stream_options", self._name if self._items else "")
        rest = {key: value for key, value in body.items() if key not in left_out}
        return _hash(self._digest + self._frame_digest + self.path.encode(), to_json(rest, sorts=True))

    def new_body(self, body: dict[str, Any]) -> dict[str, Any]:
        """The request without what is known."""
        return {**body, **dict.fromkeys(_FRAME), self._name: self.new} if self.num_known else body

    def seen_as(self, messages: list[dict[str, Any]], tools: Any) -> Seen:
        """What the next request is compared with; `messages` and `tools` are those of `new_body`."""
        if self.num_known:
            messages, tools = [*self.seen.messages, *messages], self.seen.tools
        return Seen(self.path, self._frame, self._frame_digest, self._items, self._digest, messages, tools)


def _is_apart(items: list[Any], place: int) -> bool:
    """Whether no chat message is made of items before and behind a place; a system message may go into a user's."""
    if not place:
        return False
    last = items[place - 1]
    is_closed = last.get("role") in ("user", "tool") or last.get("type") == "function_call_output"
    return is_closed and not any(isinstance(item, dict) and item.get("role") == "system" for item in items[place:])


class _Held:
    """Ids that grow at their end, and their JSON, which each request of the conversation sends again."""

    def __init__(self) -> None:
        self.ids = array("i")
        self._json = bytearray()
        self._ends = {0: 0}  # of the JSON, by the number of ids before it
        self._written = 0

    def json(self, length: int) -> bytes:
        """The first `length` ids as JSON writes them, without brackets; only those that are new are written."""
        if length < self._written and length not in self._ends:
            return orjson.dumps(self.ids[:length].tolist())[1:-1]
        if length > self._written:
            comma = b"," if self._written else b""
            self._json += comma + orjson.dumps(self.ids[self._written : length].tolist())[1:-1]
            self._written, self._ends[length] = length, len(self._json)
        return bytes(memoryview(self._json)[: self._ends[length]])


class SharedIds(Sequence[int]):
    """The first ids of an array that grows, and those that a turn adds: the prompts of a conversation share one.

    A list of its own for each prompt would take turns x context of memory, and to make each as long as it is.
    """

    def __init__(self, held: _Held, length: int, added: list[int]) -> None:
        self.held, self._length, self._added = held, length, added

    @classmethod
    def of(cls, ids: Sequence[int]) -> SharedIds:
        """Ids that are kept already, else in an array of their own."""
        return ids.kept() if isinstance(ids, SharedIds) else cls(_Held(), 0, list(ids)).kept()

    def plus(self, ids: list[int]) -> SharedIds:
        """Longer ids; the array grows when they are kept."""
        return SharedIds(self.held, self._length, [*self._added, *ids])

    def kept(self) -> SharedIds:
        """The same ids, in the array as a whole: a new one, where another conversation has gone on from there."""
        if not self._added:
            return self
        held = self.held
        if len(held.ids) != self._length:
            held = _Held()
            held.ids.extend(self.held.ids[: self._length])
        held.ids.extend(self._added)
        return SharedIds(held, len(held.ids), [])

    def json(self) -> bytes:
        """The ids as a list of JSON."""
        parts = [self.held.json(self._length), orjson.dumps(self._added)[1:-1]]
        return b"[" + b",".join(filter(None, parts)) + b"]"

    def __len__(self) -> int:
        return self._length + len(self._added)

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(place, slice):
            place = range(len(self))[place]
            return self.held.ids[place] if place < self._length else self._added[place - self._length]
        start, stop, step = place.indices(len(self))
        if step > 0 and start >= self._length:
            return self._added[start - self._length : max(stop - self._length, 0) : step]
        return [*self.held.ids[: self._length].tolist(), *self._added][place]

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == list(other)

    __hash__ = None  # type: ignore[assignment]


class SharedBytes:
    """The first bytes of a buffer that grows: experts of a conversation's tokens, which every call returns anew.

    Kept for each turn by itself they would take turns x context of memory. What a call says of tokens that an earlier
    call has read or written is left out: their log-probs belong to the experts of that call.
    """

    def __init__(self, held: bytearray | None = None) -> None:
        self.held = bytearray() if held is None else held
        self._length = len(self.held)

    def then(self, text: str) -> SharedBytes:
        """Those of a longer conversation that begins with this one, from the engine's base64."""
        whole = base64.b64decode(text)
        if len(self.held) != self._length:  # another conversation has gone on from here
            return SharedBytes(self.held[: self._length] + whole[self._length :])
        self.held += whole[self._length :]
        return SharedBytes(self.held)

    def __bytes__(self) -> bytes:
        return bytes(memoryview(self.held)[: self._length])


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
        same = _num_same(last, messages) if tools == last_tools else 0
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
            return Prompt(tokens, canonical, match.digest, known.turn)
        return Prompt(render(tokenizer, messages, match.tools), canonical, match.digest)

    def _continued(self, tokenizer: Any, known: _Known, new: list[Message], tools: Tools) -> SharedIds | None:
        # A short head is enough: what a template writes behind an assistant's turn depends on what follows it.
        first_user = next((i for i, m in enumerate(known.messages) if m["role"] == "user"), 0)
        head = [_cut(m) for m in known.messages[: first_user + 1] if m["role"] != "assistant"]
        so_far = [*head, {"role": "assistant", "content": ""}]
        try:
            ids = SharedIds.of(known.turn.prompt_ids).plus(known.turn.output_ids)
            return ids.plus(next_turn_tokens(tokenizer, so_far, new, tokens=ids, tools=tools))
        except ValueError as error:  # a template that wants calls before what tools say, or shows no such turn
            logger.warning("the session is rendered as a whole, which may begin a new sample: %s", error)
            return None

    def add(self, prompt: Prompt, answer: Message, turn: TurnRecord) -> None:
        """Remember a conversation that ends with the model's answer; of two with equal messages the first is kept."""
        known = _Known([*prompt.messages, answer], turn)
        self._known.setdefault(_next(prompt.digest, answer), known)


def kept(prompt: Prompt, turn: TurnRecord) -> TurnRecord:
    """A turn to be held: its prompt's ids, and the engine's choice of experts, shared with the turns before it."""
    meta_info, before = turn.meta_info or {}, (prompt.before and prompt.before.meta_info) or {}
    if isinstance(text := meta_info.get(EXPERTS), str):
        shared = before.get(EXPERTS) if prompt.before else None
        meta_info = {**meta_info, EXPERTS: (shared if isinstance(shared, SharedBytes) else SharedBytes()).then(text)}
    parts = tuple(replace(part, meta_info=without_experts(part.meta_info)) for part in turn.parts)
    return replace(turn, prompt_ids=SharedIds.of(turn.prompt_ids), meta_info=meta_info or turn.meta_info, parts=parts)


def _num_same(old: list[Message], new: list[Message]) -> int:
    """How many messages two lists have in common at their head."""
    if new[: len(old)] == old:  # the usual case is compared in C
        return len(old)
    pairs = enumerate(zip(old, new, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(old), len(new)))


def _cut(message: Message) -> Message:
    """A message with the beginning and the end of its text."""
    text = message.get("content")
    if not isinstance(text, str) or len(text) <= 2 * _HEAD_CHARS:
        return message
    return {**message, "content": text[:_HEAD_CHARS] + text[-_HEAD_CHARS:]}


def _digests(messages: list[Message], tools: Tools, *, after: bytes | None = None) -> list[bytes]:
    """For each message the digest of the conversation up to it; `after` is that of the messages before."""
    digest = after or _hash(to_json(tools or [], sorts=True))
    return [digest := _next(digest, message) for message in messages]


def _next(digest: bytes, message: Message) -> bytes:
    """Add to a digest what equal messages share: role, text without thoughts, calls."""
    text = str(message.get("content") or "")
    if message["role"] == "assistant":
        text = text.rpartition("</think>")[2]
    said = text.strip().encode(errors="surrogatepass")
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    rest = [message["role"], len(said), [[call.get("name"), call.get("arguments")] for call in calls]]
    return _hash(digest, to_json(rest, sorts=True), said)


def to_json(value: Any, *, sorts: bool = False) -> bytes:
    """JSON, its keys sorted if that is asked for; also of lone surrogates and huge numbers."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sorts else 0)
    except TypeError:
        return json.dumps(value, sort_keys=sorts).encode()


def _hash(before: bytes, *parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join((before, *parts)), digest_size=16).digest()


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
