"""Images in the requests of agents: opened once, named by their content in messages, one token each for the engine.

A message has the name of an image in its place, `{"type": "image", "image": NAME}`, so that messages stay small and
those of later requests are compared as texts are. Token ids of a session have one token for each image, as engines
take them; `widened` puts all tokens of each there for the trainer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from slime.processes.wait import DaemonThreads
from slime.rollout.sampling.images import MediaTokens, read_prompt
from slime.utils.errors import UsageError
from slime.utils.processing_utils import ImageOptions, encode_image_for_rollout_engine, process_vision_info
from slime.utils.types import Sample

_threads = DaemonThreads("agent-images", 4)


@dataclass(frozen=True, eq=False)
class Picture:
    """An image of a session.

    Attributes:
        image: of PIL.
        uri: what an engine gets.
        token: the id that stands for it.
        num_tokens: how many of them the trainer has.
        inputs: what the processor made of it.
    """

    image: Any
    uri: str
    token: int
    num_tokens: int
    inputs: dict[str, np.ndarray]


class Pictures:
    """Opens the images of requests; what several sessions show is read by the processor once.

    Args:
        processor: of the checkpoint.
        tokenizer: of the checkpoint.
        options: how images are opened.
    """

    def __init__(self, processor: Any, tokenizer: Any, options: ImageOptions) -> None:
        self._processor, self._tokenizer, self._options = processor, tokenizer, options
        self._open: WeakValueDictionary[str, Picture] = WeakValueDictionary()
        self.media = MediaTokens.of(processor)

    async def take(self, held: dict[str, Picture], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Open the images of messages.

        Args:
            held: the session's images by name; those that are new are added.
            messages: their images are data URIs or addresses.

        Returns:
            the messages, with names in the place of images.

        Raises:
            UsageError: an image is none, cannot be read, or is an address and none is fetched (--allow-image-urls).
        """
        return [
            {**message, "content": [await self._named(held, part) for part in message["content"]]}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]

    async def _named(self, held: dict[str, Picture], part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] != "image":
            return part
        if not part["image"].startswith(("data:", "http://", "https://")):  # a path would be one of this host's
            raise UsageError(f"an image must be a data URI, base64 or an http address, not {part['image'][:100]!r}")
        name = hashlib.blake2b(part["image"].encode(), digest_size=16).hexdigest()
        if name not in held:
            if (picture := self._open.get(name)) is None:
                picture = await _threads.run(partial(self._read, part))
            held[name] = self._open[name] = picture
        return {"type": "image", "image": name}

    def _read(self, part: dict[str, Any]) -> Picture:
        [image] = process_vision_info([{"content": [part]}], self._processor, self._options)["images"]
        prompt = read_prompt(self._processor, self._tokenizer, self._tokenizer.decode([self.media.image]), [image])
        uri = encode_image_for_rollout_engine(image)
        return Picture(image, uri, self.media.image, len(prompt.tokens), prompt.inputs or {})

    def of_prompt(
        self, held: dict[str, Picture], messages: list[dict[str, Any]], ids: Sequence[int]
    ) -> tuple[Picture, ...]:
        """The images of messages, in order.

        Raises:
            UsageError: the token ids have another number of places for images.
        """
        contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
        found = tuple(held[part["image"]] for content in contents for part in content if part["type"] == "image")
        if found and (problem := self.media.problem(ids[:], len(found))):
            raise UsageError(
                f"the conversation has {problem}; a text holds one of {self.media.words(self._tokenizer)}, which the "
                "model or a tool wrote, or the chat template leaves an image out"
            )
        return found


def width(ids: Sequence[int], images: Sequence[Picture]) -> int:
    """How many tokens a prompt has with all of each image."""
    return len(ids) + (sum(image.num_tokens - 1 for image in images) if images else 0)


class Widened:
    """Token ids with all tokens of each image, segment by segment; the first ids that stand for one are the images.

    Attributes:
        spans: [start, length] of the images so far.
    """

    def __init__(self, images: Sequence[Picture]) -> None:
        self.images, self.spans = images, list[list[int]]()

    def segment(self, ids: Sequence[int], start: int) -> list[int]:
        """The tokens of a segment that begins at a place of the widened tokens."""
        found: list[int] = []
        for token in ids:
            image = self.images[len(self.spans)] if len(self.spans) < len(self.images) else None
            if image is None or token != image.token:
                found.append(token)
                continue
            self.spans.append([start + len(found), image.num_tokens])
            found += [token] * image.num_tokens
        return found if self.images else list(ids)

    def give(self, sample: Sample) -> None:
        """Set the images of a sample: those whose tokens it has."""
        kept = self.images[: len(sample.image_spans or ())]
        if not kept:
            return
        sample.multimodal_inputs = {"images": [image.image for image in kept], "videos": None}
        sample.multimodal_train_inputs = {
            name: np.concatenate([image.inputs[name] for image in kept]) for name in kept[0].inputs
        }


def spans_within(spans: list[list[int]], length: int) -> tuple[list[list[int]], int]:
    """Those of the spans that end within a length, and the length, less where it would cut an image."""
    kept = [[start, count] for start, count in spans if start + count <= length]
    cut = spans[len(kept)][0] if len(kept) < len(spans) else length
    return kept, min(cut, length)
