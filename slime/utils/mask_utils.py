"""Loss masks for supervised fine-tuning: which tokens of a conversation the model should learn to write.

The conversation is rendered once by the tokenizer's own chat template and the assistant's spans are found by their
markers. The markers are learned from the template itself (rendering three short probes), so every ChatML-like family
works. Each span is tokenised on its own, exactly as the engine sees it: the prompt's tokens, then the response's.
It does not know about samples or training.
"""

from __future__ import annotations

import os.path
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from slime.utils.processing_utils import encode_text, render_chat

TOKENIZER_TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen")
_PROBE = "probe"


@dataclass(frozen=True)
class TurnMarkers:
    """What surrounds an assistant turn in rendered text.

    `header` opens every assistant turn, `prefill` is what the generation prompt adds after it (a family's "<think>"),
    `end` closes the turn.
    """

    header: str
    prefill: str
    end: str


class MultiTurnLossMaskGenerator:
    """Token ids and loss mask of a conversation.

    Args:
        tokenizer: one with a chat template.
        tokenizer_type: the family, as in --loss-mask-type. `distill_qwen` trains only the last assistant turn, because
            its template drops the reasoning of earlier ones.

    Example: with a ChatML template, `[user "1+1", assistant "2"]` renders to
    `<|im_start|>user\\n1+1<|im_end|>\\n<|im_start|>assistant\\n2<|im_end|>\\n` and the mask is 1 on `2<|im_end|>`.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        if tokenizer_type not in TOKENIZER_TYPES:
            raise ValueError(f"--loss-mask-type {tokenizer_type}: known are {', '.join(TOKENIZER_TYPES)}")
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type
        self.markers = find_turn_markers(tokenizer)

    def get_loss_mask(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """Render, tokenise and mask a conversation.

        Args:
            messages: role/content messages; an assistant message with `step_loss_mask` other than 1 is not trained.
            tools: schemas for the template.

        Returns:
            (token ids, mask), equally long; 1 on what the assistant wrote, its end-of-turn marker included.

        Raises:
            ValueError: the rendered text has not one span per assistant message (the text itself holds markers).
        """
        shown = [{key: value for key, value in message.items() if key != "step_loss_mask"} for message in messages]
        text = render_chat(self.tokenizer, shown, tools=tools, add_generation_prompt=False)
        assistants = [message for message in messages if message["role"] == "assistant"]
        spans = self._assistant_spans(text)
        if len(spans) != len(assistants):
            raise ValueError(
                f"the chat template rendered {len(spans)} assistant turns for {len(assistants)} assistant messages; "
                f"does a message contain the marker {self.markers.header!r} or {self.markers.end!r}?"
            )
        trained = [message.get("step_loss_mask", 1) == 1 for message in assistants]
        if self.tokenizer_type == "distill_qwen":
            trained[:-1] = [False] * (len(trained) - 1)
        return self._encode(text, [span for span, is_trained in zip(spans, trained, strict=True) if is_trained])

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        """Per mask, the tokens from the first trained one to the end (0 when nothing is trained)."""
        return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]

    def get_text_from_loss_mask(self, token_ids: list[int], loss_mask: list[int]) -> list[str]:
        """The trained texts, one per contiguous span."""
        pairs = groupby(zip(token_ids, loss_mask, strict=True), key=lambda pair: pair[1])
        return [self.tokenizer.decode([token for token, _ in span]) for is_trained, span in pairs if is_trained]

    def _assistant_spans(self, text: str) -> list[tuple[int, int]]:
        spans, position = [], 0
        while (found := text.find(self.markers.header, position)) >= 0:
            start = found + len(self.markers.header)
            if self.markers.prefill and text.startswith(self.markers.prefill, start):
                start += len(self.markers.prefill)
            end = text.find(self.markers.end, start)
            position = len(text) if end < 0 else end + len(self.markers.end)
            spans.append((start, position))
        return spans

    def _encode(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        mask: list[int] = []
        position = 0
        for start, end in [*spans, (len(text), len(text))]:
            for piece, is_trained in ((text[position:start], 0), (text[start:end], 1)):
                ids = encode_text(self.tokenizer, piece) if piece else []
                tokens += ids
                mask += [is_trained] * len(ids)
            position = end
        return tokens, mask


def find_turn_markers(tokenizer: Any) -> TurnMarkers:
    """Learn from the chat template what opens and closes an assistant turn.

    Raises:
        ValueError: the template marks no turns (no header, or no end marker).
    """
    user, reply = {"role": "user", "content": _PROBE}, {"role": "assistant", "content": "reply"}
    before = render_chat(tokenizer, [user], add_generation_prompt=False)
    prompt = render_chat(tokenizer, [user], add_generation_prompt=True)[len(before) :]
    # An earlier turn shows the bare header: templates of reasoning models add an empty <think> to the last turn only.
    earlier = render_chat(tokenizer, [user, reply, user], add_generation_prompt=False)[len(before) :]
    header = os.path.commonprefix([prompt, earlier])
    last = render_chat(tokenizer, [user, reply], add_generation_prompt=False)
    end = last[last.rindex("reply") + len("reply") :].strip()
    if not header or not end:
        raise ValueError(
            f"the chat template does not mark assistant turns (header {header!r}, end {end!r}), so no loss mask "
            "can be made; use a tokenizer whose template does, or --rollout-function-path with masks of your own"
        )
    return TurnMarkers(header=header, prefill=prompt[len(header) :], end=end)
