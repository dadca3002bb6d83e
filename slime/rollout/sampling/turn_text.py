"""The text that a chat template writes behind a model's turn, from stand-ins for what it only passes on.

A turn costs what its new messages do: neither the turn itself nor the schemas of tools are rendered, and where the
template shows new texts as they are, what is around them is rendered once for all turns of a conversation. Callers
bring messages and tokenise the text.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Sequence
from typing import Any

import orjson

from slime.utils.processing_utils import render_chat

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
_STAND_IN = f"StandIn{secrets.token_hex(8)}"  # no message has it by chance
_ANY_TOOL = f"Tool{secrets.token_hex(8)}"
_ANY_FUNCTION = {"name": _ANY_TOOL, "description": "", "parameters": {"type": "object", "properties": {}}}
_ANY_TOOLS = [{"type": "function", "function": _ANY_FUNCTION}]
_TEXT = f"Text{secrets.token_hex(8)}"
_LONGEST_KEPT = 1 << 13  # bytes of messages


def text_after_turn(
    tokenizer: Any,
    so_far: Sequence[Message],
    new: Sequence[Message],
    *,
    tools: Tools = None,
    template_kwargs: dict[str, Any] | None = None,
) -> str:
    """Return what the template writes from the end of the model's text on: the turn's end, the new messages and the
    generation prompt.

    Args:
        tokenizer: with a chat template.
        so_far: ends with the model's turn, in whose place a stand-in is rendered.
        new: of tools or of the user, in order.
        tools: schemas; they have a stand-in, too, for to write 36 KB of them takes longer than all else. Where it is
            in that text, they are shown as they are.
        template_kwargs: more arguments for the template.

    Raises:
        ValueError: the template leaves the model's turn out.
    """
    shown, any_tools = [*so_far[:-1], {"role": "assistant", "content": _STAND_IN}], _ANY_TOOLS if tools else None
    kwargs, template = template_kwargs or {}, getattr(tokenizer, "chat_template", None)
    texts = [_passed_on(template, message.get("content")) for message in new]
    if all(texts):
        stand_ins = [
            {**message, "content": message["content"].replace(text, _any_text(place), 1)}
            for place, (message, text) in enumerate(zip(new, texts, strict=True))
        ]
        frame = _frame(tokenizer, template, len(texts), _key([[*shown, *stand_ins], any_tools, kwargs]))
        if frame is not None:
            return frame[0] + "".join(text + after for text, after in zip(texts, frame[1:], strict=True))
    following = _rendered(tokenizer, [*shown, *new], any_tools, kwargs)
    return following if _ANY_TOOL not in following else _rendered(tokenizer, [*shown, *new], tools, kwargs)


def _rendered(tokenizer: Any, shown: list[Message], tools: Tools, kwargs: dict[str, Any]) -> str:
    text = render_chat(tokenizer, shown, tools=tools, **kwargs)
    if (count := text.count(_STAND_IN)) != 1:
        raise ValueError(f"the chat template shows the assistant's turn {count} times instead of once")
    return text.partition(_STAND_IN)[2]


@functools.lru_cache(maxsize=1024)
def _frame(tokenizer: Any, _template: str, count: int, key: bytes) -> list[str] | None:
    """Return what the template writes before, between and behind a number of texts; None where it changes one.

    Args:
        tokenizer: with a chat template.
        _template: its code: another one has frames of its own.
        count: of the texts.
        key: JSON of `_rendered`'s arguments, where the texts have stand-ins; empty where they are not to be kept.
    """
    if not key:
        return None
    following = _rendered(tokenizer, *orjson.loads(key))
    stand_ins = [_any_text(place) for place in range(count)]
    frame = re.split("|".join(map(re.escape, stand_ins)), following)
    is_whole = frame[0] + "".join(map("".join, zip(stand_ins, frame[1:], strict=False))) == following
    return frame if len(frame) == count + 1 and is_whole and _ANY_TOOL not in following else None


def _any_text(place: int) -> str:
    """Return the stand-in for a text: with all that a template which escapes texts changes."""
    return f"{_TEXT}\n\t\"'\\ &<é> {place}."


def _key(arguments: list[Any]) -> bytes:
    try:
        key = orjson.dumps(arguments)
    except TypeError:  # images, lone surrogates
        return b""
    return key if len(key) < _LONGEST_KEPT else b""


def _passed_on(template: Any, content: Any) -> str:
    """Return a content without outer whitespace, where the template sees the same in it and in a stand-in; else ""."""
    if not isinstance(content, str) or not isinstance(template, str):
        return ""
    text, (marks, strings) = content.strip(), _looked_for(template)
    return "" if text in strings or any(mark in content for mark in marks) else text


@functools.lru_cache(maxsize=8)
def _looked_for(template: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return what a template may look for in a text, and all strings of its code, which a text may equal.

    The first are strings that are no words ("</think>"), and words before `in` or behind a parenthesis.
    """
    import jinja2

    try:
        code = [part for part in jinja2.Environment(autoescape=True).lex(template) if part[1] != "whitespace"]
    except jinja2.TemplateError:  # whoever renders it says so
        return ("",), frozenset()
    marks, strings = set(), set()
    for (_, _, before), (_, kind, quoted), (_, _, after) in zip(code, code[1:], code[2:], strict=False):
        if kind == "string":
            strings.add(text := quoted[1:-1].replace("\\n", "\n").strip())
            if text and (re.search(r"[^\w\s]", text) or before == "(" or after in ("in", "not")):
                marks.add(text)
    if any(mark in _any_text(0) for mark in marks):
        marks = {""}  # the stand-in says nothing of other texts
    return tuple(marks), frozenset(strings)
