"""Columns of a rollout's files, and their values from samples.

A text beyond a bound is cut, and its whole length stays in `prompt_chars` or `response_chars`. What a sample holds in
another form than slime's own code leaves it (a list of another length, an object in a dict) becomes null or its text:
a record must not refuse what the run accepts.
"""

from __future__ import annotations

import base64
import binascii
import io
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from slime.checkpoints.rollout_files import ROWS_PER_GROUP
from slime.utils.data import get_source
from slime.utils.rewards import reward_weights
from slime.utils.types import Sample

MAX_TEXT = 200_000
"""Characters of a prompt, a response or a conversation that are kept."""
MAX_JSON = 8_000
"""Characters of metadata, reward parts and labels that are kept."""
PREVIEW = 80
"""Characters from each end of a text in its preview."""
MAX_SPANS = 200
MOST_IMAGES, IMAGE_SIDE, MOST_PIXELS = 8, 320, 50_000_000
"""Images of a sample that are kept, pixels of their longer side, and pixels of an image that is opened at all."""
IMAGE_URI = "data:image/"
Placed = tuple[int, Sample, str | None]
TEXT_COLUMNS = ("prompt", "response", "messages", "metadata", "times", "thumbnails")
TOKEN_COLUMNS = ("tokens", "loss_mask", "rollout_log_probs")
_INTS, _FLOATS = pa.list_(pa.int32()), pa.list_(pa.float32())
SAMPLES = pa.schema(
    [
        ("sample_id", pa.int64()),  # place in the rollout's order of samples
        ("group_index", pa.int64()),
        ("index", pa.int64()),
        ("rollout_id", pa.int64()),  # the execution, as Sample.rollout_id
        ("dataset", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("messages", pa.string()),  # JSON: {"messages": [...], "tools": [...] or null}; null: the prompt is plain text
        ("tokens", _INTS),
        ("response_length", pa.int32()),
        ("loss_mask", pa.list_(pa.int8())),
        ("rollout_log_probs", _FLOATS),
        ("reward", pa.float32()),
        ("reward_parts", pa.string()),
        ("status", pa.string()),
        ("weight_versions", pa.list_(pa.string())),
        ("num_turns", pa.int32()),
        ("times", pa.string()),  # JSON, see `times_of`
        ("label", pa.string()),
        ("metadata", pa.string()),
        ("removed", pa.bool_()),
        ("end_reason", pa.string()),
        ("reward_is_trusted", pa.bool_()),
        ("images", pa.int32()),
        ("prompt_chars", pa.int64()),
        ("response_chars", pa.int64()),
        ("prompt_preview", pa.string()),
        ("response_preview", pa.string()),
        ("prompt_length", pa.int32()),  # tokens before the response
        ("thumbnails", pa.list_(pa.string())),  # small JPEGs of its images, as data URIs
    ]
)
PLAIN = ("sample_id", "index", *TEXT_COLUMNS, "tokens", "rollout_log_probs", "prompt_preview", "response_preview")
"""Columns whose values rarely repeat."""
PER_TOKEN = ("log_probs", "ref_log_probs", "teacher_log_probs", "advantages", "returns", "values", "entropy")
TRAINER = pa.schema(
    [
        (
            "sample_id",
            pa.int64(),
        ),  # place in what the trainer got, which is the rollout's order unless a hook changed it
        ("index", pa.int64()),  # Sample.index, or the place where that is None
        ("rank", pa.int32()),
        *((name, _FLOATS) for name in PER_TOKEN),
    ]
)
PLAIN_TRAINER = ("log_probs", "ref_log_probs", "teacher_log_probs", "values", "entropy")


def sample_tables(samples: Sequence[Placed], *, reward_key: str | None) -> Iterator[pa.Table]:
    """Yield the rows of some samples, a part at a time.

    Args:
        samples: (place in the rollout, sample, data set; None: where its prompt says it comes from).
        reward_key: --reward-key, which names the number in a reward that is a dict.
    """
    made: dict[int, str | None] = {}
    for start in range(0, len(samples), ROWS_PER_GROUP):
        part = samples[start : start + ROWS_PER_GROUP]
        rows = [_row(place, sample, dataset, reward_key) for place, sample, dataset in part]
        for row, (_, sample, _) in zip(rows, part, strict=True):
            row["thumbnails"] = _thumbnails_of(sample, made)
        yield pa.Table.from_pylist(rows, schema=SAMPLES)


def _row(place: int, sample: Sample, dataset: str | None, reward_key: str | None) -> dict[str, Any]:
    source = get_source(sample)
    prompt, messages = _texts_of(sample)
    response, length = _valid(sample.response), sample.response_length
    mask = _array(sample.loss_mask, np.int8, length) if sample.loss_mask is not None else np.ones(length, np.int8)
    tokens = _array(sample.tokens, np.int32, None)
    parts = sample.reward if isinstance(sample.reward, Mapping) else None
    return {
        "sample_id": place,
        "group_index": sample.group_index,
        "index": sample.index if isinstance(sample.index, int) else None,  # a hook may leave anything
        "rollout_id": sample.rollout_id,
        "dataset": dataset if dataset is not None else (None if source == "unknown" else source),
        "prompt": prompt[:MAX_TEXT],
        "response": response[:MAX_TEXT],
        "messages": messages,
        "tokens": tokens,
        "response_length": length,
        "loss_mask": mask,
        "rollout_log_probs": _array(sample.rollout_log_probs, np.float32, length),
        "reward": _number(sample.reward if parts is None else _of_parts(parts, reward_key)),
        "reward_parts": None if parts is None else bounded_json(parts),
        "status": sample.status.value,
        "weight_versions": [str(version) for version in sample.weight_versions],
        "num_turns": _turns(sample, mask),
        "times": json.dumps(times_of(sample)),
        "label": _label(sample.label),
        "metadata": bounded_json({key: value for key, value in sample.metadata.items() if key != "messages"}),
        "removed": bool(sample.remove_sample),
        "end_reason": None if sample.end_reason is None else str(sample.end_reason),
        "reward_is_trusted": bool(sample.reward_is_trusted),
        "images": len((sample.multimodal_inputs or {}).get("images") or ()),
        "prompt_chars": len(prompt),
        "response_chars": len(response),
        "prompt_preview": preview(prompt),
        "response_preview": preview(response),
        "prompt_length": max(0, (0 if tokens is None else len(tokens)) - length),
    }


def _of_parts(parts: Mapping[str, Any], key: str | None) -> float | None:
    """The number that --reward-key names; None where it is not there, or is no number."""
    weights = reward_weights(key) if key else {}
    numbers = [_number(parts.get(name)) for name in weights]
    if not numbers or None in numbers:
        return None
    return sum(weight * number for weight, number in zip(weights.values(), numbers, strict=True) if number is not None)


def _thumbnails_of(sample: Sample, made: dict[int, str | None]) -> list[str] | None:
    """Small pictures of the first `MOST_IMAGES` images of a sample, as data URIs; None where it has none.

    Args:
        made: those that are made already, by the identity of their image, which samples of a group share.
    """
    images = list((sample.multimodal_inputs or {}).get("images") or ())
    if not images:
        replaced(sample.metadata.get("messages") or sample.prompt, images)
    for image in images[:MOST_IMAGES]:
        if id(image) not in made:
            made[id(image)] = thumbnail(image)
    return [uri for image in images[:MOST_IMAGES] if (uri := made[id(image)]) is not None] or None


def thumbnail(image: Any) -> str | None:
    """Return a small JPEG of an image (PIL's, or a data URI) as a data URI; None where it is none, or too large."""
    from PIL import Image

    try:
        if isinstance(image, str):
            image = Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2], validate=True)))
        if not isinstance(image, Image.Image) or image.width * image.height > MOST_PIXELS:
            return None
        small = image.convert("RGB")
        small.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
        file = io.BytesIO()
        small.save(file, "JPEG", quality=80)
    except (OSError, ValueError, binascii.Error, Image.DecompressionBombError):  # cut short, or no image
        return None
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def replaced(value: Any, images: list[Any]) -> Any:
    """Return a conversation with a word in the place of each image that it holds as a data URI.

    Args:
        value: messages, or a part of them.
        images: gets the URIs.
    """
    if isinstance(value, str) and value.startswith(IMAGE_URI):
        images.append(value)
        return f"(image {len(images)})"
    if isinstance(value, Mapping):
        return {key: replaced(entry, images) for key, entry in value.items()}
    return [replaced(entry, images) for entry in value] if isinstance(value, list | tuple) else value


def _texts_of(sample: Sample) -> tuple[str, str | None]:
    """(the prompt as text, the conversation as JSON; None where the prompt is plain text)."""
    prompt = sample.prompt if isinstance(sample.prompt, str) else _dumps(replaced(sample.prompt, []))
    conversation = sample.metadata.get("messages")  # of a multi-turn function: all turns
    if conversation is None and not isinstance(sample.prompt, str):
        conversation = sample.prompt
    if conversation is None:
        return _valid(prompt), None
    text = _dumps({"messages": replaced(conversation, []), "tools": sample.metadata.get("tools")})
    return _valid(prompt), text if len(text) <= MAX_TEXT else _dumps({"messages": None, "tools": None})


def preview(text: str) -> str:
    """Return both ends of a text, for a list.

    Example:
        >>> preview("short")
        'short'
        >>> len(preview("x" * 1000))
        163
    """
    return text if len(text) <= 2 * PREVIEW else f"{text[:PREVIEW]} … {text[-PREVIEW:]}"


def bounded_json(values: Mapping[str, Any]) -> str:
    """Return a dict as JSON of at most about `MAX_JSON` characters: what is too long is replaced by its size."""
    text = _dumps(values)
    if len(text) <= MAX_JSON:
        return text
    bound = MAX_JSON // max(1, min(len(values), 40)) - 40
    short = {}
    for key, value in itertools.islice(values.items(), 40):
        entry = _dumps(value)
        short[str(key)[:80]] = value if len(entry) <= bound else f"({len(entry)} characters, left out)"
    if len(values) > len(short):
        short["..."] = f"{len(values) - len(short)} more entries"
    return _dumps(short)


def times_of(sample: Sample) -> dict[str, Any]:
    """Return when what happened to a sample, in seconds since 1970 and, with `_s`, seconds.

    Returns:
        "begin" and "end" of generation and reward, "generation_s", "reward_s" (as far as they were noted),
        "tool_s" (outside of engines), and "spans" [[name, begin, end], ...] of its trace, if it has one.
    """
    noted: Mapping[str, Any] = vars(sample).get("times") or {}
    times: dict[str, Any] = {key: value for key, value in noted.items() if isinstance(value, int | float)}
    if sample.non_generation_time:
        times["tool_s"] = float(sample.non_generation_time)
    trace = vars(sample).get("trace")
    if isinstance(trace, Mapping):
        spans = times["spans"] = _spans(trace.get("events") or ())
        if spans:
            times = {"begin": spans[0][1], "end": max(end for _, _, end in spans)} | times
    return times


def _spans(events: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
    begun: dict[Any, Mapping[str, Any]] = {}
    spans: list[list[Any]] = []
    for event in events:
        if event.get("type") == "span_start":
            begun[event.get("span_id")] = event
        elif event.get("type") == "span_end" and (start := begun.pop(event.get("span_id"), None)):
            spans.append([start["name"], start["ts"], event["ts"]])
    return sorted(spans, key=lambda span: span[1])[:MAX_SPANS]


def _turns(sample: Sample, mask: np.ndarray | None) -> int:
    """What a multi-turn function has counted, else the runs of tokens that are trained: at least 1 of a response."""
    counted = sample.metadata.get("round_number")
    if isinstance(counted, int):
        return counted
    if mask is None or not sample.response_length:
        return int(bool(sample.response_length))
    if sample.loss_mask is None:  # all of it is trained
        return 1
    return max(1, int(np.count_nonzero(np.diff(mask.astype(np.int8), prepend=0) == 1)))


def _array(values: Any, dtype: type[np.generic], length: int | None) -> np.ndarray | None:
    """Numbers as an array; None where there are none, or not as many as there must be."""
    if values is None or (length is not None and len(values) != length):
        return None
    found = np.asarray(values, dtype)
    return found if found.ndim == 1 else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not math.isinf(value) else None


def _label(label: Any) -> str | None:
    if label is None:
        return None
    return _valid((label if isinstance(label, str) else _dumps(label))[:MAX_JSON])


def _dumps(value: Any) -> str:
    """JSON; what is no plain data becomes its text, of which the beginning is kept."""
    return _valid(json.dumps(value, ensure_ascii=False, default=lambda entry: str(entry)[:200], skipkeys=True))


def _valid(text: str) -> str:
    """Text that can be written as UTF-8: lone surrogates, which byte tokens may leave, are replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")
