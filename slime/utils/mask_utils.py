"""Loss masks for supervised fine-tuning: which tokens of a conversation the model should learn to write.

The conversation is rendered once by the tokenizer's own chat template and the assistant's spans are found by their
markers. The markers are learned from the template itself (rendering a few short probes), so families need no code of
their own. Each span is tokenised on its own, exactly as the engine sees it: the prompt's tokens, then the response's.
"""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from slime.utils.errors import UsageError
from slime.utils.processing_utils import encode_text, render_chat

TOKENIZER_TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen")
_PROBE = "probe"
_REPLY = "reply"


@dataclass(frozen=True)
class TurnMarkers:
    """What surrounds an assistant turn in rendered text.

    Attributes:
        header: opens every assistant turn.
        prefill: what the generation prompt adds after it (a family's "<think>").
        ends: the model writes one of these to close its turn. Most families have one; GLM-4 writes the header of
            whoever speaks next.
        tail: what the template puts after the last assistant message of a conversation: nothing, or the end and
            perhaps a newline.
    """

    header: str
    prefill: str
    ends: tuple[str, ...]
    tail: str


def get_response_lengths(loss_masks: list[list[int]]) -> list[int]:
    """Per mask, the tokens from the first trained one to the end (0 when nothing is trained)."""
    return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Token ids and loss mask of a conversation.

    Args:
        tokenizer: one with a chat template.
        tokenizer_type: the family, as in --loss-mask-type. `qwen3` shows every assistant turn as the template shows
            the last, with its thought, which the template drops from earlier turns; `qwen` and `qwen3_5` leave the
            conversation as the template renders it. `distill_qwen` trains only the last assistant turn, behind the
            generation prompt and as the message has it: its template would drop the thought from any turn.

    Example: with a ChatML template, `[user "1+1", assistant "2"]` renders to
    `<|im_start|>user\\n1+1<|im_end|>\\n<|im_start|>assistant\\n2<|im_end|>\\n` and the mask is 1 on `2<|im_end|>\\n`.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        if tokenizer_type not in TOKENIZER_TYPES:
            raise ValueError(f"--loss-mask-type {tokenizer_type}: known are {', '.join(TOKENIZER_TYPES)}")
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type
        self.markers = find_turn_markers(tokenizer)
        # One search for all: a marker that never comes is not looked for up to the end of the text at every turn.
        self._end = re.compile("|".join(map(re.escape, sorted(self.markers.ends, key=len))))
        tail = self.markers.tail
        self._after_end = tail[len(tail.rstrip()) :]

    def get_loss_mask(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """Render, tokenise and mask a conversation.

        Args:
            messages: role/content messages; an assistant message with `step_loss_mask` other than 1 is not trained.
            tools: schemas for the template.

        Returns:
            (token ids, mask), equally long; 1 on what the assistant wrote, the end-of-turn marker and the newline that
            the template puts after it included.

        Raises:
            ValueError: the rendered text has not one span per assistant message (the text itself holds markers).
        """
        shown = [{key: value for key, value in message.items() if key != "step_loss_mask"} for message in messages]
        text = render_chat(self.tokenizer, shown, tools=tools, add_generation_prompt=False)
        assistants = [message for message in messages if message["role"] == "assistant"]
        is_text = isinstance(messages[-1].get("content"), str) and not messages[-1].get("tool_calls")
        if self.tokenizer_type == "distill_qwen" and messages[-1]["role"] == "assistant" and is_text:
            return self._last_turn_as_written(shown, tools, self._trained(assistants)[-1])
        spans = self._assistant_spans(text)
        if len(spans) != len(assistants):
            raise ValueError(
                f"the chat template rendered {len(spans)} assistant turns for {len(assistants)} assistant messages; "
                f"does a message contain the marker {self.markers.header!r} or {self.markers.ends[0]!r}?"
            )
        bodies = [text[start:end] for start, end in spans]
        if self.tokenizer_type == "qwen3":
            bodies = [self._as_last_turn(message) for message in shown if message["role"] == "assistant"]
        pieces: list[tuple[str, bool]] = []
        position = 0
        for (start, end), body, is_trained in zip(spans, bodies, self._trained(assistants), strict=True):
            pieces += [(text[position:start], False), *self._split_prefill(body, is_trained)]
            position = end
        return self._encode([*pieces, (text[position:], False)])

    def get_loss_mask_with_multimodal_alignment(
        self, messages: list[dict[str, Any]], input_ids: list[int], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """Mask the tokens that a processor made of a conversation with images, whose placeholders it lengthened.

        Args:
            messages: as for `get_loss_mask`; contents may be lists of parts.
            input_ids: the processor's tokens of the whole conversation.
            tools: unused, because nothing is rendered; part of the public signature.

        Returns:
            (input_ids, mask), equally long.

        Raises:
            ValueError: the tokens hold not one assistant turn per assistant message.
        """
        assistants = [message for message in messages if message["role"] == "assistant"]
        spans = self._assistant_token_spans(list(input_ids))
        if len(spans) != len(assistants):
            raise ValueError(
                f"input_ids hold {len(spans)} assistant turns for {len(assistants)} assistant messages; were they "
                "made from these messages, with this tokenizer's chat template?"
            )
        mask = [0] * len(input_ids)
        for (start, end), is_trained in zip(spans, self._trained(assistants), strict=True):
            mask[start:end] = [int(is_trained)] * (end - start)
        return list(input_ids), mask

    def _trained(self, assistants: list[dict[str, Any]]) -> list[bool]:
        trained = [message.get("step_loss_mask", 1) == 1 for message in assistants]
        if self.tokenizer_type == "distill_qwen":
            trained[:-1] = [False] * (len(trained) - 1)
        return trained

    get_response_lengths = staticmethod(get_response_lengths)

    def get_text_from_loss_mask(self, token_ids: list[int], loss_masks: list[int]) -> list[str]:
        """The trained texts, one per contiguous span."""
        pairs = groupby(zip(token_ids, loss_masks, strict=True), key=lambda pair: pair[1])
        return [self.tokenizer.decode([token for token, _ in span]) for is_trained, span in pairs if is_trained]

    def _assistant_spans(self, text: str) -> list[tuple[int, int]]:
        spans, position = [], 0
        while (found := text.find(self.markers.header, position)) >= 0:
            start = found + len(self.markers.header)
            end = self._end.search(text, start)
            position = end.end() if end else start + len(text[start:].removesuffix(self.markers.tail))
            if end and text.startswith(self._after_end, position):
                position += len(self._after_end)
            spans.append((start, position))
        return spans

    def _last_turn_as_written(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, is_trained: bool
    ) -> tuple[list[int], list[int]]:
        """Return (tokens, mask) of a last turn that keeps its thought: what the model answers the prompt with."""
        prompt = render_chat(self.tokenizer, messages[:-1], tools=tools, add_generation_prompt=True)
        written = messages[-1]["content"]
        opening = self.markers.prefill.rstrip()
        if opening and written.startswith(opening):  # the prompt has it
            written = written.removeprefix(opening).removeprefix(self.markers.prefill[len(opening) :])
        end = self.markers.tail
        return self._encode([(prompt, False), (written.removesuffix(end) + end, is_trained)])

    def _as_last_turn(self, message: dict[str, Any]) -> str:
        """What the template renders of an assistant message at the end of a conversation, without the header."""
        user = {"role": "user", "content": _PROBE}
        before, whole = (
            render_chat(self.tokenizer, turns, add_generation_prompt=False) for turns in ([user], [user, message])
        )
        return whole.removeprefix(before).removeprefix(self.markers.header)

    def _split_prefill(self, body: str, is_trained: bool) -> list[tuple[str, bool]]:
        """The part of a turn that the generation prompt wrote, and the one that the model writes."""
        if not is_trained:
            return [(body, False)]
        prefill = self.markers.prefill if body.startswith(self.markers.prefill) else ""
        return [(prefill, False), (body[len(prefill) :], True)]

    def _assistant_token_spans(self, ids: list[int]) -> list[tuple[int, int]]:
        header, prefill = (encode_text(self.tokenizer, text) for text in (self.markers.header, self.markers.prefill))
        ends = sorted((encode_text(self.tokenizer, end) for end in self.markers.ends), key=len)
        after_end = encode_text(self.tokenizer, self._after_end) if self._after_end else []
        spans, position = [], 0
        while (found := find_sublist(ids, header, position)) >= 0:
            start = found + len(header)
            # Only what is there of it: an empty thought joins the newlines of "<think>\n" and "\n</think>".
            start += len(os.path.commonprefix([prefill, ids[start : start + len(prefill)]]))
            position = next(
                (at + len(end) for at in range(start, len(ids)) for end in ends if ids[at : at + len(end)] == end),
                len(ids),
            )
            if ids[position : position + len(after_end)] == after_end:
                position += len(after_end)
            spans.append((start, position))
        return spans

    def _encode(self, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        mask: list[int] = []
        for is_trained, run in groupby((piece for piece in pieces if piece[0]), key=lambda piece: piece[1]):
            ids = encode_text(self.tokenizer, "".join(text for text, _ in run))
            tokens += ids
            mask += [int(is_trained)] * len(ids)
        return tokens, mask


def find_sublist(items: list[int], wanted: list[int], start: int = 0) -> int:
    """Where `wanted` begins in `items`, from `start` on; -1 when it does not occur (or is empty)."""
    length = len(wanted)
    candidates = (i for i in range(start, len(items) - length + 1) if items[i : i + length] == wanted)
    return next(candidates, -1) if wanted else -1


def find_turn_markers(tokenizer: Any, **template_kwargs: Any) -> TurnMarkers:
    """Learn from the chat template what opens and closes an assistant turn.

    Args:
        template_kwargs: more arguments for the template; they may change what the generation prompt adds.

    Raises:
        ValueError: the template marks no turns (no header, or no end marker).
    """
    user, reply = {"role": "user", "content": _PROBE}, {"role": "assistant", "content": _REPLY}

    def render(*messages: dict[str, Any], with_prompt: bool = False) -> str:
        return render_chat(tokenizer, list(messages), add_generation_prompt=with_prompt, **template_kwargs)

    before = render(user)
    prompt = render(user, with_prompt=True)[len(before) :]
    # An earlier turn shows the bare header: templates of reasoning models add an empty <think> to the last turn only.
    header = os.path.commonprefix([prompt, render(user, reply, user)[len(before) :]])
    tail = _after_reply(render(user, reply))
    ends = (tail.strip(),) if tail.strip() else _ends_by_next_speaker(tokenizer, [user, reply])
    if not header or not ends:
        raise ValueError(
            f"the chat template does not mark assistant turns (header {header!r}, ends {ends}), so no loss mask "
            "can be made; use a tokenizer whose template does, or --rollout-function-path with masks of your own"
        )
    return TurnMarkers(header=header, prefill=prompt[len(header) :], ends=ends, tail=tail)


def _after_reply(text: str) -> str:
    return text[text.rindex(_REPLY) + len(_REPLY) :]


def _ends_by_next_speaker(tokenizer: Any, turns: list[dict[str, Any]]) -> tuple[str, ...]:
    """The special tokens that follow a reply when a user or a tool speaks next."""
    markers = set(tokenizer.get_added_vocab())
    ends = []
    for role in ("user", "tool"):
        try:
            text = render_chat(tokenizer, [*turns, {"role": role, "content": _PROBE}], add_generation_prompt=False)
        except UsageError:  # a template without tools
            continue
        following = _after_reply(text)
        ends += [marker for marker in markers if following.startswith(marker)]
    return tuple(dict.fromkeys(ends))
