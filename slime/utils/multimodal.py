"""Images, videos and sounds of a data row, put into its messages as content parts.

A part stands where the prompt's text has the placeholder of its kind ("<image>"), or where a message has a part of its
kind without content. It opens no file: that is slime.utils.processing_utils.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slime.utils.errors import UsageError
from slime.utils.types import MultimodalTypes


def with_parts(
    messages: list[dict[str, Any]], row: Mapping[str, Any], keys: Mapping[str, str], where: str
) -> list[dict[str, Any]]:
    """The messages with what the row holds beside its text.

    Args:
        messages: contents are texts, or lists of parts; they are not changed.
        row: its fields named by `keys` hold one thing, a list of things, or nothing.
        keys: kind ("image", "video", "audio") -> field (--multimodal-keys).
        where: "file:line", for error messages.

    Raises:
        UsageError: there are more placeholders than things, or fewer.
    """
    left = {kind: _things(row.get(field)) for kind, field in keys.items()}
    found = [{**message, "content": _parts(message.get("content"), left, where)} for message in messages]
    for kind, things in left.items():
        if things:
            raise UsageError(
                f"{where}: {len(things)} of {keys[kind]!r} (--multimodal-keys {kind}) have no {placeholder(kind)} in "
                "the prompt"
            )
    return found


def placeholder(kind: str) -> str:
    """What stands for a kind in a prompt's text."""
    known = MultimodalTypes.get(kind)
    return known.placeholder if known else f"<{kind}>"


def _things(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _parts(content: Any, left: dict[str, list[Any]], where: str) -> Any:
    if isinstance(content, list):
        return [_filled(part, left, where) for part in content]
    if not isinstance(content, str):
        return content
    kinds = {placeholder(kind): kind for kind in left}
    pieces = re.split("(" + "|".join(map(re.escape, kinds)) + ")", content)
    if len(pieces) == 1:
        return content
    return [
        _next(kinds[piece], left, where) if piece in kinds else {"type": "text", "text": piece}
        for piece in pieces
        if piece
    ]


def _filled(part: Any, left: dict[str, list[Any]], where: str) -> Any:
    """A part that only names its kind gets the next thing of that kind."""
    kind = part.get("type") if isinstance(part, dict) else None
    return _next(kind, left, where) if kind in left and part.get(kind) is None else part


def _next(kind: str, left: dict[str, list[Any]], where: str) -> dict[str, Any]:
    if not left[kind]:
        raise UsageError(f"{where}: the prompt has more {placeholder(kind)} than the row has of them")
    return {"type": kind, kind: left[kind].pop(0)}
