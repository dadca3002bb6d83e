"""The tokens between two turns of a model: what a tool or a user said, as the chat template writes it.

Tokens that a model wrote, or has seen, never change: a turn is only ever appended. A conversation that is rendered and
tokenised as a whole can come out differently (a template drops the thoughts of earlier turns, a tokenizer joins what
the model wrote in two tokens). What the engine saw is then what is trained, and `count_drift` says how much differs.
It knows tokenizers and messages, and neither samples nor engines.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from slime.utils.mask_utils import TurnMarkers, find_turn_markers
from slime.utils.processing_utils import encode_text, render_chat

Message = dict[str, Any]
_markers: WeakKeyDictionary[Any, dict[str, TurnMarkers]] = WeakKeyDictionary()


def turn_markers(tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> TurnMarkers:
    """What opens and closes an assistant turn, learned once per tokenizer and arguments of its template.

    Raises:
        ValueError: the chat template does not mark turns.
    """
    known, key = _markers.setdefault(tokenizer, {}), json.dumps(template_kwargs or {}, sort_keys=True, default=str)
    if key not in known:
        known[key] = find_turn_markers(tokenizer, **(template_kwargs or {}))
    return known[key]


def next_turn_tokens(
    tokenizer: Any,
    messages_so_far: Sequence[Message],
    new_messages: Sequence[Message],
    *,
    tokens: Sequence[int],
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """The tokens to append after a model's turn, so that the model can write the next one.

    The conversation is rendered with a stand-in for the model's last message, and what follows the stand-in is
    tokenised: so it is the template's own text, and the model's tokens have no part in it.

    Args:
        tokenizer: with a chat template.
        messages_so_far: ends with the assistant message that the model has just written.
        new_messages: of tools or of the user, in order.
        tokens: all tokens so far. Where the model was cut off before it closed its turn, the result begins with the
            end marker.
        tools: schemas for the template.
        template_kwargs: more arguments for the template.

    Returns:
        Token ids of the rest of the turn's end, the new messages and the generation prompt.

    Raises:
        ValueError: the messages do not end with an assistant's, or the template leaves that message out.
    """
    if not messages_so_far or messages_so_far[-1]["role"] != "assistant":
        raise ValueError("messages_so_far must end with the assistant message that the new messages answer")
    stand_in = _unused_word([*messages_so_far, *new_messages])
    shown = [*messages_so_far[:-1], {"role": "assistant", "content": stand_in}, *new_messages]
    text = render_chat(tokenizer, shown, tools=tools, **(template_kwargs or {}))
    if text.count(stand_in) != 1:
        raise ValueError(f"the chat template shows the assistant's turn {text.count(stand_in)} times instead of once")
    ids = encode_text(tokenizer, text.partition(stand_in)[2])
    for end in turn_markers(tokenizer, template_kwargs).ends:
        end_ids = encode_text(tokenizer, end)
        if ids[: len(end_ids)] == end_ids and list(tokens[-len(end_ids) :]) == end_ids:
            return ids[len(end_ids) :]
    return ids


def count_drift(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tokens: Sequence[int],
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> int:
    """By how many tokens a conversation, rendered and tokenised as a whole, differs from its tokens.

    Args:
        messages: the whole conversation; ends with an assistant message.
        tokens: as they were appended turn by turn, the prompt included. It does not matter whether the last turn was
            closed.

    Returns:
        Length of the stretch between the first and the last difference, in the longer of the two; 0 when equal.
    """
    markers = turn_markers(tokenizer, template_kwargs)
    text = render_chat(tokenizer, list(messages), tools=tools, add_generation_prompt=False, **(template_kwargs or {}))
    whole = encode_text(tokenizer, text.removesuffix(markers.tail))
    own = list(tokens)
    for end_ids in (encode_text(tokenizer, end) for end in markers.ends):
        if own[-len(end_ids) :] == end_ids:
            own = own[: -len(end_ids)]
            break
    if own == whole:
        return 0
    same_head = len(os.path.commonprefix([own, whole]))
    same_tail = len(os.path.commonprefix([own[same_head:][::-1], whole[same_head:][::-1]]))
    return max(len(own), len(whole)) - same_head - same_tail


def turn_content(tokenizer: Any, tokens: Sequence[int], template_kwargs: dict[str, Any] | None = None) -> str:
    """The content of the message that a model wrote as `tokens`: without the marker that closes the turn, and with
    what the generation prompt began for it (a family's "<think>"), so that the template recognises a thought.
    """
    markers = turn_markers(tokenizer, template_kwargs)
    text = markers.prefill + str(tokenizer.decode(list(tokens), skip_special_tokens=False))
    for end in markers.ends:
        if text.endswith(end):
            return text.removesuffix(end)
    return text


def _unused_word(messages: Sequence[Message]) -> str:
    said = re.findall("StandIn(X*)", str(messages))
    return "StandIn" + "X" * (max(map(len, said)) + 1 if said else 0)
