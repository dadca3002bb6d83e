"""Prompts that have more tokens than allowed: found in threads, then dropped, refused or cut."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slime.utils.errors import UsageError
from slime.utils.processing_utils import encode_text, render_chat
from slime.utils.types import Sample

CHUNK = 250
"""Rows that are looked at together."""
CUTS = ("left", "right", "middle")
_HALF_A_CHARACTER = "\ufffd"


def fit_prompts(
    samples: Sequence[Sample],
    tokenizer: Any,
    max_length: int | None,
    *,
    truncation: str = "drop",
    num_workers: int = 1,
    places: Sequence[str] | None = None,
    image_tokens: Sequence[int] = (),
) -> list[Sample]:
    """The samples, in order, each with a prompt of at most `max_length` tokens.

    Args:
        samples: their prompts are texts or message lists; a prompt that is cut is changed in place.
        tokenizer: measures, and cuts.
        max_length: tokens; None lets every prompt be.
        truncation: what happens to a longer prompt: "drop", "error", or where tokens are cut off: "left", "right",
            "middle".
        num_workers: threads. A tokenizer written in Rust lets go of Python's lock, so threads are as fast as
            processes, which would each have to load it first.
        places: "file:line" of each sample, for error messages.
        image_tokens: by how many tokens the images of each sample lengthen its prompt; empty = there are none.

    Raises:
        UsageError: "error" and a prompt is too long; or a cut through a message list.
    """
    if max_length is None:
        return list(samples)
    lengths = prompt_lengths(samples, tokenizer, num_workers=num_workers)
    if image_tokens:
        lengths = [length + more for length, more in zip(lengths, image_tokens, strict=True)]
    too_long = [i for i, length in enumerate(lengths) if length > max_length]
    if not too_long:
        return list(samples)
    if truncation == "drop":
        return [sample for sample, length in zip(samples, lengths, strict=True) if length <= max_length]
    first = too_long[0]
    if truncation == "error":
        raise UsageError(
            f"{_place(places, first)}: the prompt has {lengths[first]} tokens, the limit is {max_length} (the first "
            f"of {len(too_long)} such prompts); raise --rollout-max-prompt-len or --eval-max-prompt-len, or choose "
            "another --prompt-truncation"
        )
    _cut(samples, tokenizer, {i: lengths[i] for i in too_long}, max_length, side=truncation, places=places)
    return list(samples)


def _cut(
    samples: Sequence[Sample],
    tokenizer: Any,
    too_long: dict[int, int],
    max_length: int,
    *,
    side: str,
    places: Sequence[str] | None,
) -> None:
    for i, length in too_long.items():
        prompt = samples[i].prompt
        if not isinstance(prompt, str):
            raise UsageError(
                f"{_place(places, i)}: --prompt-truncation {side} cuts text, but this prompt of {length} "
                "tokens is a message list; add --apply-chat-template, or choose drop"
            )
        samples[i].prompt = cut_text(tokenizer, prompt, max_length, side=side)


def prompt_lengths(samples: Sequence[Sample], tokenizer: Any, *, num_workers: int = 1) -> list[int]:
    """Tokens of each prompt; message lists are rendered first."""
    chunks = [samples[start : start + CHUNK] for start in range(0, len(samples), CHUNK)]
    measure = functools.partial(_lengths_of_chunk, tokenizer)
    if num_workers == 1 or len(chunks) < 2:
        return [length for chunk in chunks for length in measure(chunk)]
    with ThreadPoolExecutor(num_workers, thread_name_prefix="prompt-length") as pool:
        return [length for lengths in pool.map(measure, chunks) for length in lengths]


def _lengths_of_chunk(tokenizer: Any, samples: Sequence[Sample]) -> list[int]:
    texts = [s.prompt if isinstance(s.prompt, str) else _render_whole(tokenizer, s) for s in samples]
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def _render_whole(tokenizer: Any, sample: Sample) -> str:
    assert isinstance(sample.prompt, list), "only message lists need rendering"
    tools = sample.metadata.get("tools")
    return render_chat(tokenizer, sample.prompt, tools=tools, add_generation_prompt=False)


def cut_text(tokenizer: Any, text: str, max_length: int, *, side: str) -> str:
    """The text without the tokens that are too many.

    The result is text again, so its tokens need not be those that were kept: where they are more, one more is cut.

    Args:
        tokenizer: its `decode` must keep special tokens.
        text: a rendered prompt.
        max_length: tokens of the result, at most.
        side: where tokens are cut off: "left" keeps the end, "right" the beginning, "middle" half of each.

    Raises:
        UsageError: nothing readable is left.
    """
    ids = encode_text(tokenizer, text)
    for keep in range(max_length, 0, -1):
        num_head = {"left": 0, "right": keep, "middle": keep - keep // 2}[side]
        head, tail = ids[:num_head], ids[len(ids) - (keep - num_head) :]
        # A token may end inside a character of several bytes; what is left of one is not worth keeping.
        left, right = (
            tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for part in (head, tail)
        )
        shorter = left.rstrip(_HALF_A_CHARACTER) + right.lstrip(_HALF_A_CHARACTER)
        if shorter and len(encode_text(tokenizer, shorter)) <= max_length:
            return str(shorter)
    raise UsageError(f"--prompt-truncation {side}: nothing is left of a prompt that is cut to {max_length} tokens")


def _place(places: Sequence[str] | None, i: int) -> str:
    return places[i] if places is not None else f"prompt {i}"
