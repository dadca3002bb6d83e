"""Prompts with images: the tokens that the trainer takes, those that the engine takes, and the proof that both agree.

A processor puts as many tokens in the place of an image as the model makes vectors of it. The trainer's tokens
(`Sample.tokens`) are these; an engine wants one token an image and does the same itself. How many tokens its prompt
came to is in each of its answers, and must be the trainer's number: an engine that left an image out, or scaled it
otherwise, would answer all the same.

`Sample.image_spans` alone says which tokens are images: a model may write the token that stands for one, or for a
video, which is then a word to the engine and to the trainer. Its response ends there (`MediaTokens`): an engine that
gets more such tokens than images refuses the request, or never answers.

Example: one image of three tokens (id 9) between two words, and a response of one token::

    tokens      = [5, 9, 9, 9, 6, 21]
    image_spans = [[1, 3]]
    engine_ids  = [5, 9, 6, 21]
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from slime.config.args import Args
from slime.processes.wait import DaemonThreads
from slime.rollout.tool_calls import EnvError
from slime.utils.errors import UsageError
from slime.utils.processing_utils import (
    build_processor_kwargs,
    encode_image_for_rollout_engine,
    encode_text,
    image_options,
    process_vision_info,
)
from slime.utils.types import Sample

T = TypeVar("T")
_NOT_PIXELS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
_KEPT_PROMPTS, _KEPT_IMAGES = 32, 256
_SHOWN_SIDE = 320
_OPENING = "<|vision_start|>"  # of all Qwen models; the processor of Qwen2.5-VL does not name it
_threads = DaemonThreads("processor", 8)


@dataclass(frozen=True)
class ImagePrompt:
    """What a processor made of a text and its images.

    Attributes:
        tokens: with all tokens of each image.
        spans: [start, length] of each image in `tokens`.
        inputs: arrays for the model's forward pass, by the processor's names; None without images.
    """

    tokens: list[int]
    spans: list[list[int]]
    inputs: dict[str, np.ndarray] | None


def image_token_id(processor: Any) -> int:
    """The id of the token that stands for (a part of) an image.

    Raises:
        UsageError: the processor does not say.
    """
    found = getattr(processor, "image_token_id", None)
    if found is None and (token := getattr(processor, "image_token", None)):
        found = processor.tokenizer.convert_tokens_to_ids(token)
    if not isinstance(found, int):
        raise UsageError(
            f"{type(processor).__name__} does not name a token of images, so none can be put into a prompt"
        )
    return found


@dataclass(frozen=True)
class MediaTokens:
    """Ids of the tokens that are not words where a prompt has images; a response ends with the first of them.

    Attributes:
        image: stands for (a part of) an image.
        others: stand for a video or a sound. There are none, and an engine refuses a prompt that asks for one.
        opening: stands before an image. An engine of Qwen2.5-VL looks at the token after it, and fails without one.
    """

    image: int
    others: tuple[int, ...] = ()
    opening: tuple[int, ...] = ()

    @classmethod
    def of(cls, processor: Any) -> MediaTokens:
        """Read them from a processor.

        Raises:
            UsageError: it does not name a token of images.
        """
        others = (getattr(processor, name, None) for name in ("video_token_id", "audio_token_id"))
        tokenizer = getattr(processor, "tokenizer", None)
        opening = tokenizer.get_added_vocab().get(_OPENING) if tokenizer else None  # all words would take 0.3 s
        found, last = (tuple(token for token in ids if isinstance(token, int)) for ids in (others, (opening,)))
        return cls(image_token_id(processor), found, last)

    @property
    def stops(self) -> tuple[int, ...]:
        """All of them."""
        return (self.image, *self.others, *self.opening)

    def with_stops(self, sampling_params: dict[str, Any]) -> dict[str, Any]:
        """Let a response end where the model writes one. Its log-prob stays that of the policy."""
        known = sampling_params.get("stop_token_ids") or []
        return {**sampling_params, "stop_token_ids": [*known, *(token for token in self.stops if token not in known)]}

    def end(self, sample: Sample) -> bool:
        """Whether the model ended the response of a sample with images by writing one."""
        if not sample.image_spans or not sample.response_length:
            return False
        last, length = sample.image_spans[-1]
        return sample.tokens[-1] in self.stops and last + length < len(sample.tokens)

    def problem(self, ids: Sequence[int], num_images: int) -> str | None:
        """Say which of an engine's tokens stand for what is not there."""
        count, more = ids.count(self.image), sum(ids.count(token) for token in self.others) if num_images else 0
        found = f"{count} tokens that stand for an image and {num_images} images"
        if more:
            return f"{found}, and {more} that stand for a video or a sound"
        return None if count == num_images else found

    def words(self, tokenizer: Any) -> list[str]:
        """The texts of those that stand for something."""
        return [tokenizer.decode([token]) for token in (self.image, *self.others)]


def read_prompt(processor: Any, tokenizer: Any, text: str, images: Sequence[Any]) -> ImagePrompt:
    """Let the processor read a text and its images, once for all that needs either.

    Args:
        processor: of the checkpoint.
        tokenizer: of the checkpoint; its tokens of the text are those that the engine gets.
        text: with one placeholder for each image.
        images: of PIL, in the order of their placeholders.

    Raises:
        UsageError: there are more placeholders than images or fewer, or one of a video, or the processor writes other
            tokens around an image than the text has, which the engine's need not.
    """
    plain, media = encode_text(tokenizer, text), MediaTokens.of(processor)
    image = media.image
    if problem := media.problem(plain, len(images)):
        raise UsageError(
            f"the prompt has {problem}; does its text, or the chat template, hold one of {media.words(tokenizer)} by "
            f"itself, or leave an image out? {text[:80]!r}"
        )
    if not images:
        return ImagePrompt(plain, [], None)
    outputs = dict(processor(text=[text], **build_processor_kwargs({"images": list(images)})))
    whole = [int(token) for token in outputs["input_ids"][0]]
    inputs = {name: np.asarray(value) for name, value in outputs.items() if name not in _NOT_PIXELS}
    tokens, spans = expand(plain, _counts(processor, inputs, whole.count(image), len(images)), image)
    if tokens != whole:
        raise UsageError(
            f"{type(processor).__name__} makes other tokens of a prompt with images than those of its text and the "
            f"token {image} for each part of an image, which an engine need not do alike; the images of this model "
            "are not supported"
        )
    return ImagePrompt(tokens, spans, inputs)


def _counts(processor: Any, inputs: dict[str, np.ndarray], num_tokens: int, num_images: int) -> list[int]:
    """Tokens of each image."""
    grids = inputs.get("image_grid_thw")
    if grids is None:
        return [num_tokens // num_images] * num_images  # a fixed number, or `read_prompt` finds that it is not
    merged = getattr(processor.image_processor, "merge_size", 1) ** 2
    return [int(count) // merged for count in grids.prod(1)]


def expand(tokens: Sequence[int], counts: Sequence[int], image: int) -> tuple[list[int], list[list[int]]]:
    """Put `counts[i]` tokens in the place of the token of the i-th image.

    Returns:
        (the tokens, [start, length] of each image in them).

    Example:
        >>> expand([5, 9, 6, 9], [3, 1], 9)
        ([5, 9, 9, 9, 6, 9], [[1, 3], [5, 1]])
    """
    found: list[int] = []
    spans: list[list[int]] = []
    for token in tokens:
        count = counts[len(spans)] if token == image else 1
        if token == image:
            spans.append([len(found), count])
        found += [token] * count
    return found, spans


def engine_ids(sample: Sample, media: MediaTokens | None) -> list[int]:
    """The tokens of a sample as an engine takes them: one for each image.

    Args:
        sample: its tokens so far.
        media: of its processor; needed where it has images.

    Raises:
        ValueError: a token stands for an image, a video or a sound that is not there; the engine would wait for it.
    """
    kept, spans = collapsed(sample), sample.image_spans
    if spans and media is not None and (problem := media.problem(kept, len(spans))):
        raise ValueError(
            f"sample {sample.index} has {problem}; an engine cannot go on from there. Leave --rollout-ignore-eos out, "
            "so that a response ends with such a token; a prompt to which tools add images must not have one"
        )
    return kept


def collapsed(sample: Sample, start: int = 0) -> list[int]:
    """The tokens of a sample, from one on that is not inside an image, with one for each image."""
    if not sample.image_spans:
        return sample.tokens[start:] if start else sample.tokens
    kept, end = [], start
    for first, length in sample.image_spans:
        if first >= start:
            kept += sample.tokens[end : first + 1]
            end = first + length
    return kept + sample.tokens[end:]


def of_prompt(sample: Sample) -> dict[str, Any] | None:
    """The images of a sample's prompt, without those that were added to its response."""
    given, end = sample.multimodal_inputs, len(sample.tokens) - sample.response_length
    added = [start for start, _ in sample.image_spans or [] if start >= end]
    return {**given, "images": given["images"][: -len(added)]} if given and added else given


# ---- once for each prompt, not for each of its samples


class _Recent(Generic[T]):
    """What was made of objects, which are told apart by identity; the oldest are forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: OrderedDict[Any, tuple[Any, T]] = OrderedDict()

    def get(self, thing: Any, key: Any, make: Callable[[], T]) -> T:
        """What `make` made of a thing; `key` says what else it depends on."""
        place = (id(thing), key)
        if place not in self._made:
            self._made[place] = (thing, make())  # the thing stays, so that no other gets its id
            if len(self._made) > self._most:
                self._made.popitem(last=False)
        self._made.move_to_end(place)
        return self._made[place][1]

    def forget(self, thing: Any, key: Any) -> None:
        """Make it anew next time."""
        self._made.pop((id(thing), key), None)


_prompts: _Recent[asyncio.Future[ImagePrompt]] = _Recent(_KEPT_PROMPTS)
_uris: _Recent[str] = _Recent(_KEPT_IMAGES)
_small: _Recent[Any] = _Recent(_KEPT_IMAGES)


async def read_prompt_once(processor: Any, tokenizer: Any, text: str, images: list[Any]) -> ImagePrompt:
    """`read_prompt` in a thread; the samples of a prompt, which share the list of its images, share the result."""
    key = (text, id(asyncio.get_running_loop()))

    def start() -> asyncio.Future[ImagePrompt]:
        return asyncio.ensure_future(_threads.run(partial(read_prompt, processor, tokenizer, text, images)))

    reading = _prompts.get(images, key, start)
    try:
        return await asyncio.shield(reading)
    finally:
        if reading.cancelled() or (reading.done() and reading.exception()):
            _prompts.forget(images, key)


def with_images(sample: Sample, images: list[Any]) -> dict[str, Any] | None:
    """The inputs of a sample with more images."""
    old = sample.multimodal_inputs or {}
    return {**old, "images": [*(old.get("images") or []), *images]} if images else sample.multimodal_inputs


def with_small_images(sample: Sample) -> dict[str, Any] | None:
    """The inputs of a sample with small copies of its images, which are all that is shown of one that is done."""
    inputs = sample.multimodal_inputs
    if not has_images(sample) or inputs is None:
        return inputs
    return {**inputs, "images": [_small.get(image, None, partial(_small_copy, image)) for image in inputs["images"]]}


def _small_copy(image: Any) -> Any:
    small = image.copy()
    small.thumbnail((_SHOWN_SIDE, _SHOWN_SIDE))
    return small


def has_images(sample: Sample) -> bool:
    """Whether there is something besides text."""
    return any((sample.multimodal_inputs or {}).values())


async def set_prompt(sample: Sample, state: Any, text: str) -> None:
    """Set the tokens of a sample that has none to those of a text and of the sample's images.

    Args:
        state: its `tokenizer`, and its `processor`, which is loaded where there are images.
    """
    images = (sample.multimodal_inputs or {}).get("images") or []
    if not images:
        sample.tokens = encode_text(state.tokenizer, text)
        return
    prompt = await read_prompt_once(state.processor, state.tokenizer, text, images)
    sample.tokens, sample.image_spans = list(prompt.tokens), [list(span) for span in prompt.spans] or None
    sample.multimodal_train_inputs = prompt.inputs


def find_images(sample: Sample, processor: Any) -> None:
    """Set the spans of a sample whose tokens and inputs user code took from the processor: those of its prompt."""
    inputs = {name: np.asarray(value) for name, value in (sample.multimodal_train_inputs or {}).items()}
    end = len(sample.tokens) - sample.response_length
    image = image_token_id(processor)
    counts = _counts(processor, inputs, sample.tokens[:end].count(image), len(inputs.get("image_grid_thw", [0])))
    places = [i for i, token in enumerate(sample.tokens[:end]) if token == image]
    starts = [sum(counts[:number]) for number in range(len(counts))]
    sample.image_spans = [[places[i], n] for i, n in zip(starts, counts, strict=True) if i < len(places)]
    sample.multimodal_train_inputs = inputs


def image_data(sample: Sample) -> list[str]:
    """The images of a sample as an engine takes them: data URIs of PNG files, which lose nothing."""
    images = (sample.multimodal_inputs or {}).get("images") or []
    return [_uris.get(image, None, partial(encode_image_for_rollout_engine, image)) for image in images]


class AnsweredImages:
    """Images that tools have answered with, until they are appended to a sample.

    Args:
        state: its `tokenizer`, its `processor`, which is loaded where there are images, and its `media`.
        args: how they are opened.
    """

    def __init__(self, state: Any, args: Args) -> None:
        self._state, self._args = state, args
        self._images: list[Any] = []
        self._read: ImagePrompt | None = None

    @property
    def num_more(self) -> int:
        """By how many tokens they lengthen a text with one place for each."""
        return len(self._read.tokens) - len(self._images) if self._read else 0

    async def read(self, answer: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """Open the images of an answer; returns it without them, as messages keep it.

        Raises:
            UsageError: the model sees none.
            EnvError: one cannot be read, or a text holds the token of images, which would stand for one more.
        """
        if isinstance(answer, str):
            self._check_text(answer)
            return answer
        processor, tokenizer = self._state.processor, self._state.tokenizer
        if processor is None:
            raise UsageError(
                f"a tool answered with an image, and the model of --hf-checkpoint {self._args.hf_checkpoint} sees "
                "none: it has no processor"
            )
        if not self._args.multimodal_keys:
            raise UsageError("a tool answered with an image; without --multimodal-keys a trainer sees nothing of it")
        for part in answer:
            self._check_text(str(part.get("text") or ""))
        try:
            opened = process_vision_info([{"content": answer}], processor, image_options(self._args))
        except UsageError as error:
            raise EnvError(f"a tool answered with an image that cannot be read: {error}") from error
        self._images = [*self._images, *opened["images"]]
        places = tokenizer.decode([image_token_id(processor)] * len(self._images))
        self._read = await read_prompt_once(processor, tokenizer, places, self._images)
        return [part if part["type"] == "text" else {"type": "image"} for part in answer]

    def _check_text(self, text: str) -> None:
        if not self._args.multimodal_keys or self._state.processor is None:
            return
        for word in self._state.media.words(self._state.tokenizer):
            if word in text:
                raise EnvError(f"a tool answered with the text {word!r}, which stands for an image: {text[:80]!r}")

    def take(self) -> list[Any]:
        """The images, which are not to be appended any more."""
        images, self._images, self._read = self._images, [], None
        return images

    def append_to(self, sample: Sample, tokens: list[int]) -> list[int]:
        """Give a sample the images, before tokens are appended to it that have one place for each.

        The lists and arrays of other samples of its prompt stay as they are.

        Returns:
            the tokens to append, with all of each image.

        Raises:
            ValueError: there are more places than images, or fewer.
        """
        if self._read is None:
            return tokens
        read, images = self._read, self.take()
        image, before = read.tokens[0], len(sample.tokens)
        if tokens.count(image) != len(images):
            raise ValueError(
                f"{len(images)} images are answered; the chat template shows {tokens.count(image)} of them"
            )
        new, spans = expand(tokens, [length for _, length in read.spans], image)
        sample.image_spans = [*(sample.image_spans or []), *([before + start, length] for start, length in spans)]
        sample.multimodal_inputs = with_images(sample, images)
        inputs, known = read.inputs or {}, sample.multimodal_train_inputs
        joined = {name: np.concatenate([known[name], value]) for name, value in inputs.items()} if known else inputs
        sample.multimodal_train_inputs = joined
        return new


def image_problem(sample: Sample) -> str | None:
    """What does not fit between a sample's images, its tokens and what the processor made of them."""
    spans, inputs = sample.image_spans or [], sample.multimodal_train_inputs
    images = (sample.multimodal_inputs or {}).get("images") or []
    if inputs is not None and not isinstance(inputs, dict):
        return f"multimodal_train_inputs of the type {type(inputs).__name__}; it must be a dict"
    if len(spans) != len(images) or bool(spans) != bool(inputs):
        return (
            f"{len(images)} images (multimodal_inputs), {len(spans)} image_spans and "
            f"{'no ' if not inputs else ''}multimodal_train_inputs; slime.rollout.sampling.images.set_prompt sets all"
        )
    end, image = 0, sample.tokens[spans[0][0]] if spans and spans[0][0] < len(sample.tokens) else None
    for start, length in spans:
        if start < end or length < 1 or sample.tokens[start : start + length] != [image] * length:
            return (
                f"image_spans {spans}, where the tokens are not all of one image; [start, length] of each are wanted"
            )
        end = start + length
    return None
