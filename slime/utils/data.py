"""The prompt file: rows to samples, checks at parse time, and the trainer's fetch of its share of a rollout.

Files are .jsonl or .parquet, with an optional slice: `path@[a:b]` (negative ends count from the end). A row that
cannot be used is an error that names the file and the line. It does not know who draws the prompts: that is
slime.rollout.data_source.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from slime.utils.errors import UsageError
from slime.utils.processing_utils import render_chat
from slime.utils.prompt_length import fit_prompts
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


def parse_slice(path: str) -> tuple[Path, slice]:
    """Split `path@[a:b]` into the file and the slice of its rows; without a suffix the slice is everything."""
    match = _SLICE.match(path)
    if not match:
        return Path(path), slice(None)
    start, stop = (int(match[end]) if match[end] else None for end in ("start", "stop"))
    return Path(match["path"]), slice(start, stop)


def read_file(path: str, malformed: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a data file, in order.

    Args:
        path: file, with an optional slice.
        malformed: where given, lines of a .jsonl that are no JSON object are left out, and why is added to this list.

    Raises:
        UsageError: the file is missing or of an unknown type, or a line is malformed (file:line and the reason).
    """
    for _, row in read_rows(path, malformed):
        yield row


def read_rows(path: str, malformed: list[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """As `read_file`, each row with its place ("file:line") for error messages."""
    file, rows = parse_slice(path)
    if not os.path.isfile(file):  # Path.is_file raises where the name is too long
        raise UsageError(
            f"data file {file} does not exist; --prompt-data and --eval-prompt-data take .jsonl or .parquet"
        )
    if file.suffix not in (".jsonl", ".parquet"):
        raise UsageError(f"data file {file} ends with {file.suffix!r}; only .jsonl and .parquet can be read")
    every = _read_jsonl(file, malformed) if file.suffix == ".jsonl" else _read_parquet(file)
    if (rows.start or 0) < 0 or (rows.stop or 0) < 0:
        return iter(list(every)[rows])  # an end counted from the end needs the length
    return itertools.islice(every, rows.start, rows.stop)


def _read_jsonl(file: Path, malformed: list[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                row = _object_of_line(line, where)
            except UsageError as error:
                if malformed is None:
                    raise
                malformed += error.messages
            else:
                yield where, row


def _object_of_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{where}: not valid JSON ({error}); each line must be one JSON object") from error
    if not isinstance(row, dict):
        raise UsageError(f"{where}: a {type(row).__name__}, but each line must be one JSON object")
    return row


def _read_parquet(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet as parquet

    number = itertools.count(1)
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches():
                yield from ((f"{file}: row {next(number)}", row) for row in batch.to_pylist())
    except pyarrow.ArrowInvalid as error:
        raise UsageError(f"{file} is no parquet file: {error}") from error


def check_data_file(
    path: str,
    *,
    prompt_key: str,
    label_key: str | None = None,
    metadata_key: str | None = None,
    skip_malformed: bool = False,
) -> int:
    """Read a whole data file once, before anything starts.

    Args:
        path: file, with an optional slice.
        prompt_key, label_key, metadata_key: columns that every row must have; None = not looked at.
        skip_malformed: lines that are no JSON object are no error.

    Returns:
        The number of rows (after the slice).

    Raises:
        UsageError: missing or empty file, malformed line, missing prompt key (the message names the keys that exist),
            missing label, or metadata that is no object.
    """
    count = 0
    malformed: list[str] | None = [] if skip_malformed else None
    for where, row in read_rows(path, malformed):
        count += 1
        _prompt_of(row, where, prompt_key)
        if label_key is not None:
            _label_of(row, where, label_key)
        if metadata_key is not None:
            _metadata_of(row, where, metadata_key)
    if not count:
        raise UsageError(_no_rows(path, malformed))
    return count


def _no_rows(path: str, malformed: list[str] | None) -> str:
    return f"data file {path} has no rows" + (f" but {len(malformed)} malformed lines" if malformed else "")


def _prompt_of(row: dict[str, Any], where: str, key: str) -> Any:
    if key not in row:
        raise UsageError(f"{where}: no key {key!r} (--input-key); the keys are {', '.join(map(repr, row)) or 'none'}")
    prompt = row[key]
    is_messages = isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt)
    if not is_messages and not (isinstance(prompt, str) and prompt):
        raise UsageError(
            f"{where}: {key!r} must be a text or a list of messages with a 'role', not {str(prompt)[:80]!r}"
        )
    return prompt


def _label_of(row: dict[str, Any], where: str, key: str) -> Any:
    if row.get(key) is None:
        have = "it is null" if key in row else f"the keys are {', '.join(map(repr, row))}"
        raise UsageError(f"{where}: no label under {key!r} (--label-key); {have}")
    return row[key]


def _object_of(value: Any, where: str, key: str, *, kind: type) -> Any:
    """A value that may be stored as JSON text (parquet files often do)."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise UsageError(f"{where}: {key!r} is a text that is no JSON ({error})") from error
    if not isinstance(value, kind):
        raise UsageError(f"{where}: {key!r} must be a JSON {kind.__name__}, not {str(value)[:80]!r}")
    return value


def _metadata_of(row: dict[str, Any], where: str, key: str) -> dict[str, Any]:
    value = row.get(key)
    return {} if value is None or value == "" else dict(_object_of(value, where, key, kind=dict))


class Dataset:
    """The prompts of one file as samples, each without a response.

    Args:
        path: file, with an optional slice.
        tokenizer: renders chat templates and measures prompts.
        processor: must be None; prompts with images are not supported yet.
        max_length: tokens of a prompt, at most; None keeps all.
        prompt_key: column of the prompt (a text or a message list).
        label_key: column copied to `Sample.label`.
        tool_key: column of tool schemas (list or JSON text), copied to `metadata["tools"]`.
        metadata_key: column copied to `Sample.metadata`.
        seed: of the shuffles.
        apply_chat_template: render prompts to text now; otherwise message lists stay lists.
        apply_chat_template_kwargs: passed on to the template.
        truncation, num_workers: what happens to longer prompts, and how many threads look for them (see
            slime.utils.prompt_length).
        skip_malformed: leave out lines that are no JSON object, with one warning.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        processor: None,
        max_length: int | None,
        *,
        prompt_key: str = "text",
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
        truncation: str = "drop",
        num_workers: int = 1,
        skip_malformed: bool = False,
    ) -> None:
        if processor is not None:
            raise UsageError("prompts with images, video or audio are not supported yet; pass processor=None")
        self._template_kwargs = apply_chat_template_kwargs or {}
        self._apply_template, self._tokenizer = apply_chat_template, tokenizer
        self._keys = {"prompt": prompt_key, "label": label_key, "tools": tool_key, "metadata": metadata_key}
        samples, places = self._read(path, skip_malformed=skip_malformed)
        self.origin_samples = fit_prompts(
            samples, tokenizer, max_length, truncation=truncation, num_workers=num_workers, places=places
        )
        if not self.origin_samples:
            raise UsageError(f"all {len(samples)} prompts of {path} are longer than {max_length} tokens")
        self.seed = seed
        self.epoch_id = -1
        self.samples = self.origin_samples

    def _read(self, path: str, *, skip_malformed: bool) -> tuple[list[Sample], list[str]]:
        malformed: list[str] | None = [] if skip_malformed else None
        samples, places = [], []
        for where, row in read_rows(path, malformed):
            samples.append(self._sample(where, row))
            places.append(where)
        if not samples:
            raise UsageError(_no_rows(path, malformed))
        if malformed:
            logger.warning("%d malformed lines are skipped; the first: %s", len(malformed), malformed[0])
        return samples, places

    def _sample(self, where: str, row: dict[str, Any]) -> Sample:
        prompt = _prompt_of(row, where, self._keys["prompt"] or "")
        metadata = _metadata_of(row, where, self._keys["metadata"] or "")
        tool_key = self._keys["tools"]
        if tool_key and row.get(tool_key):
            metadata["tools"] = _object_of(row[tool_key], where, tool_key, kind=list)
        if self._apply_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            prompt = render_chat(self._tokenizer, messages, tools=metadata.get("tools"), **self._template_kwargs)
        label_key = self._keys["label"]
        return Sample(
            prompt=prompt,
            label=_label_of(row, where, label_key) if label_key else None,
            metadata=metadata,
            apply_chat_template_kwargs=dict(self._template_kwargs),
        )

    def shuffle(self, epoch_id: int) -> None:
        """Put the prompts into the order of this epoch: a permutation of the file's order seeded by seed + epoch."""
        if epoch_id == self.epoch_id:
            return
        order = list(range(len(self.origin_samples)))
        random.Random(self.seed + epoch_id).shuffle(order)
        self.samples = [self.origin_samples[i] for i in order]
        self.epoch_id = epoch_id

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)


def filter_long_prompt(samples: list[Sample], tokenizer: Any, processor: None, max_length: int | None) -> list[Sample]:
    """The samples whose prompt has at most `max_length` tokens (None: all), in order; message lists are rendered."""
    return fit_prompts(samples, tokenizer, max_length)


def get_source(sample: Sample) -> str:
    """Where a sample's prompt comes from: `sample.source`, else metadata["source_name"], else "unknown"."""
    return str(vars(sample).get("source") or sample.metadata.get("source_name") or "unknown")


def process_rollout_data(args: Namespace, refs: list[Any], dp_rank: int, dp_size: int) -> dict[str, Any]:
    """Fetch this DP rank's share of a rollout out of Ray's object store.

    Args:
        args: unused by the object-store transport; part of the public signature.
        refs: one `Box` of an object reference per DP rank.
        dp_rank: whose share.
        dp_size: must equal the number of refs.
    """
    import ray  # the one lazy import that the layering rule grants this module

    if len(refs) != dp_size:
        raise ValueError(f"the rollout was split into {len(refs)} shares, but there are {dp_size} data-parallel ranks")
    return dict(ray.get(refs[dp_rank].inner))
