"""The prompt file: rows to samples, checks at parse time, and prompts that have more tokens than allowed.

Files are .jsonl or .parquet, with an optional slice: `path@[a:b]` (negative ends count from the end); they may be
larger than memory (slime.utils.files.rows). A row that cannot be used is an error that names the file and the line.
Long prompts are found in threads, then dropped, refused or cut. Who draws the prompts: slime.rollout.data_source.
"""

from __future__ import annotations

import logging
import random
from array import array
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from slime.utils.errors import UsageError
from slime.utils.files.prompt_length import CHUNK, CUTS, cut_text, fit_prompts, prompt_lengths
from slime.utils.files.rows import (
    MalformedLine,
    Row,
    check_data_file,
    label_of,
    messages_of,
    metadata_of,
    no_rows,
    object_of,
    open_rows,
    parse_slice,
    prompt_of,
    read_file,
    read_rows,
)
from slime.utils.files.streams import Stream
from slime.utils.processing_utils import (
    ImageOptions,
    num_image_tokens,
    process_vision_info,
    render_chat,
)
from slime.utils.train_data import process_rollout_data
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.utils.eval_config import PromptSource

__all__ = [
    "Dataset",
    "check_data_file",
    "cut_text",
    "filter_long_prompt",
    "fit_prompts",
    "get_source",
    "parse_slice",
    "process_rollout_data",
    "prompt_lengths",
    "read_file",
    "read_rows",
]
logger = logging.getLogger(__name__)
T = TypeVar("T")

HELD_BYTES = 64 * 2**20
"""Files up to this size are held in memory as samples; of larger ones only where each row is."""


class Dataset:
    """The prompts of one file as samples, each without a response.

    A file larger than `HELD_BYTES` is not held: every access reads its row again.

    Args:
        path: file, with an optional slice.
        tokenizer: renders chat templates and measures prompts.
        processor: of a model that sees images; None for text.
        max_length: tokens of a prompt, at most; None keeps all.
        prompt_key: column of the prompt (a text or a message list).
        multimodal_keys: kind ("image", ...) -> column of what stands for the placeholders of the prompt.
        label_key: column copied to `Sample.label`.
        tool_key: column of tool schemas (list or JSON text), copied to `metadata["tools"]`.
        metadata_key: column copied to `Sample.metadata`.
        seed: of the shuffles.
        apply_chat_template: render prompts to text now; otherwise message lists stay lists.
        apply_chat_template_kwargs: passed on to the template.
        truncation, num_workers: what happens to longer prompts, and how many threads look for them (see
            slime.utils.data).
        skip_malformed: leave out lines that are no JSON object, with one warning.
        keep_messages: put the message list of a rendered prompt into `metadata["messages"]`, for a reward model with
            a chat template of its own.
        images: how images are opened; None = as they are, and from this machine.
        source: the file's entry in a mixture: its system prompt, grader, generate function and metadata.
        stream_window: read the prompts as a stream (slime.utils.files.streams), which `draw` and `at` alone hand out,
            with this many rows shuffled together; None = a file.
        flag: what errors of a stream call it.

    Raises:
        UsageError: a row cannot be used, or no row is left.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        processor: Any,
        max_length: int | None,
        *,
        prompt_key: str = "text",
        multimodal_keys: dict[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
        truncation: str = "drop",
        num_workers: int = 1,
        skip_malformed: bool = False,
        keep_messages: bool = False,
        images: ImageOptions | None = None,
        source: PromptSource | None = None,
        stream_window: int | None = None,
        flag: str = "--prompt-data",
    ) -> None:
        self._keep_messages, self._source = keep_messages, source
        self.name = source.name if source else ""
        self._images = images or ImageOptions()
        self._template_kwargs = apply_chat_template_kwargs or {}
        self._apply_template, self._tokenizer, self._processor = apply_chat_template, tokenizer, processor
        self._keys = {"prompt": prompt_key, "label": label_key, "tools": tool_key, "metadata": metadata_key}
        self._multimodal_keys = multimodal_keys or {}
        self._max_length, self._truncation, self._num_workers = max_length, truncation, num_workers
        malformed: list[str] | None = [] if skip_malformed else None
        self._path, self._skips_malformed = path, skip_malformed
        self._stream = None if stream_window is None else Stream(path, flag=flag, window_rows=stream_window)
        self.origin_samples = self._read(path, malformed) if self._stream is None else ()
        if malformed:
            logger.warning("%d malformed lines are skipped; the first: %s", len(malformed), malformed[0])
        self.seed = seed
        self.epoch_id = -1
        self.samples: Sequence[Sample] = self.origin_samples

    def _read(self, path: str, malformed: list[str] | None) -> Sequence[Sample]:
        rows = open_rows(path, malformed)
        is_held = rows.num_bytes <= HELD_BYTES and not self._multimodal_keys  # images are opened when asked for
        held: list[Sample] = []
        numbers, positions, sizes = array("Q"), array("Q"), array("Q")  # 24 bytes a row say where it is
        num_rows = 0
        size = CHUNK * max(4, self._num_workers)
        scan = rows.scan(remember=not is_held)
        while chunk := list(islice(scan, size)):
            num_rows += len(chunk)
            samples = [self._sample(row.place, row.fields) for row in chunk]
            fitting = self._fit(samples, [row.place for row in chunk], self._image_tokens(chunk))
            if is_held:
                held += fitting
            else:
                kept = {id(sample) for sample in fitting}
                fitted = [row for row, sample in zip(chunk, samples, strict=True) if id(sample) in kept]
                numbers.extend(row.number for row in fitted)
                positions.extend(row.position for row in fitted)
                sizes.extend(row.size for row in fitted)
        if not num_rows:
            raise UsageError(no_rows(path, malformed))
        found: Sequence[Sample] = held
        if not is_held:
            found = _Samples(
                len(positions),
                lambda i: self.sample_of(rows.place_of(numbers[i]), rows.read(positions[i], sizes[i])),
            )
        if not found:
            raise UsageError(f"all {num_rows} prompts of {path} are longer than {self._max_length} tokens")
        if len(found) < num_rows:
            logger.info("%d of %d prompts of %s are too long and left out", num_rows - len(found), num_rows, path)
        return found

    def _image_tokens(self, rows: Sequence[Row]) -> list[int]:
        """By how many tokens the images of each row lengthen its prompt; they are looked at only where that counts."""
        if self._max_length is None or not self._sees_images:
            return [0] * len(rows)
        return [self._look(num_image_tokens, row.place, row.fields) for row in rows]

    @property
    def _sees_images(self) -> bool:
        return self._processor is not None and bool(self._multimodal_keys)

    def _look(self, read: Callable[..., T], place: str, row: dict[str, Any]) -> T:
        """What `read` makes of the images of a row."""
        messages = self._messages(place, row)
        try:
            return read(messages, self._processor, self._images)
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from error

    def _fit(self, samples: list[Sample], places: list[str], image_tokens: Sequence[int] = ()) -> list[Sample]:
        return fit_prompts(
            samples,
            self._tokenizer,
            self._max_length,
            truncation=self._truncation,
            num_workers=self._num_workers,
            places=places,
            image_tokens=image_tokens,
        )

    def sample_of(self, place: str, row: dict[str, Any]) -> Sample:
        """The sample of a row that was found to fit: its images are opened, a prompt that is cut is cut again."""
        sample = self._sample(place, row)
        if self._sees_images:
            sample.multimodal_inputs = self._look(process_vision_info, place, row)
        return self._fit([sample], [place])[0] if self._truncation in CUTS else sample

    def _messages(self, where: str, row: dict[str, Any]) -> list[dict[str, Any]]:
        messages = messages_of(row, where, self._keys["prompt"] or "", self._multimodal_keys)
        system_prompt = self._source and self._source.system_prompt
        if system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
        return messages

    def _sample(self, where: str, row: dict[str, Any]) -> Sample:
        source, metadata = self._source, metadata_of(row, where, self._keys["metadata"] or "")
        if source is not None:
            metadata = source.metadata_of(metadata)
        tool_key = self._keys["tools"]
        if tool_key and row.get(tool_key):
            metadata["tools"] = object_of(row[tool_key], where, tool_key, kind=list)
        prompt: str | list[dict[str, Any]]
        if self._apply_template:
            messages = self._messages(where, row)
            if self._keep_messages:
                metadata.setdefault("messages", messages)
            prompt = render_chat(self._tokenizer, messages, tools=metadata.get("tools"), **self._template_kwargs)
        elif self._multimodal_keys or (source is not None and source.system_prompt):
            prompt = self._messages(where, row)
        else:
            prompt = prompt_of(row, where, self._keys["prompt"] or "")
        label_key = self._keys["label"]
        return Sample(
            prompt=prompt,
            label=label_of(row, where, label_key) if label_key else None,
            metadata=metadata,
            apply_chat_template_kwargs=dict(self._template_kwargs),
            custom_rm_path=source.custom_rm_path if source else None,
            generate_function_path=source.custom_generate_function_path if source else None,
        )

    def shuffle(self, new_epoch_id: int) -> None:
        """Put the prompts into the order of this epoch: a permutation of the file's order seeded by seed + epoch."""
        if new_epoch_id == self.epoch_id:
            return
        if self._stream is not None:
            self._stream.order(self.seed + new_epoch_id)
            self.epoch_id = new_epoch_id
            return
        order = array("Q", range(len(self.origin_samples)))
        random.Random(self.seed + new_epoch_id).shuffle(order)
        self.samples = _Samples(len(order), lambda index: self.origin_samples[order[index]])
        self.epoch_id = new_epoch_id

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples) if self._stream is None else len(self._stream)

    def draw(self, place: Place, *, shuffles: bool) -> Sample:
        """The next prompt from a place on, which moves behind it; the next epoch follows without a gap.

        Raises:
            UsageError: no row of a stream can be used.
        """
        for _ in range(2):
            while place.sample_offset < len(self):
                offset, place.sample_offset = place.sample_offset, place.sample_offset + 1
                if (sample := self.at(offset)) is not None:
                    return sample
            place.epoch_id, place.sample_offset = place.epoch_id + 1, 0
            if shuffles:
                self.shuffle(place.epoch_id)
        raise UsageError(f"--prompt-data {self._path}: no row has a prompt of at most {self._max_length} tokens")

    def at(self, offset: int) -> Sample | None:
        """The prompt there; None where the row of a stream is empty, too long, or malformed and skipped."""
        if self._stream is None:
            return self.samples[offset]
        try:
            place, fields = self._stream.row(offset)
        except MalformedLine:
            if not self._skips_malformed:
                raise
            return None
        if fields is None:
            return None
        sample = self._sample(place, fields)
        image_tokens = self._image_tokens([Row(place, 0, 0, 0, fields)])
        if not self._fit([sample], [place], image_tokens):
            return None
        if self._sees_images:
            sample.multimodal_inputs = self._look(process_vision_info, place, fields)
        return sample


class Place(Protocol):
    """Where in a data set the next prompt is."""

    sample_offset: int
    epoch_id: int


class _Samples(Sequence[Sample]):
    """A sequence that makes each sample when it is asked for."""

    def __init__(self, length: int, make: Callable[[int], Sample]) -> None:
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(self._length))]
        return self._make(range(self._length)[index])


def filter_long_prompt(
    origin_samples: list[Sample], tokenizer: Any, processor: Any, max_length: int | None
) -> list[Sample]:
    """The samples whose prompt has at most `max_length` tokens (None: all), in order; message lists are rendered."""
    return fit_prompts(origin_samples, tokenizer, max_length)


def get_source(sample: Sample) -> str:
    """Where a sample's prompt comes from: `sample.source`, else metadata["source_name"], else "unknown"."""
    return str(vars(sample).get("source") or sample.metadata.get("source_name") or "unknown")
