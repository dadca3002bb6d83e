"""Rows of a .jsonl or .parquet file, one after the other or by number, without holding the file in memory.

A row is found again by its position: the byte offset of its line; rows of a .parquet, which has no cheap access to one
row, are written to a temporary file as they are read.
"""

from __future__ import annotations

import itertools
import os
import pickle
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson

from slime.utils.errors import UsageError
from slime.utils.processing_utils import image_parts, missing_image, with_parts

_BATCH = 256  # rows of a .parquet
_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


class Row(NamedTuple):
    """One row.

    Attributes:
        place: "file:line", for a reader of error messages.
        number: of the line or the row, from which `place_of` makes the place again.
        position, size: where `read` finds it again.
        fields: its content.
    """

    place: str
    number: int
    position: int
    size: int
    fields: dict[str, Any]


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
    for row in open_rows(path, malformed).scan():
        yield row.fields


def read_rows(path: str, malformed: list[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """As `read_file`, each row with its place ("file:line") for error messages."""
    for row in open_rows(path, malformed).scan():
        yield row.place, row.fields


def open_rows(path: str, malformed: list[str] | None = None) -> JsonlRows | ParquetRows:
    """The rows of a file, with an optional slice; arguments and errors as for `read_file`."""
    file, rows = parse_slice(path)
    if not os.path.isfile(file):  # Path.is_file raises where the name is too long
        raise UsageError(
            f"data file {file} does not exist; --prompt-data and --eval-prompt-data take .jsonl or .parquet"
        )
    if file.suffix not in (".jsonl", ".parquet"):
        raise UsageError(f"data file {file} ends with {file.suffix!r}; only .jsonl and .parquet can be read")
    return JsonlRows(file, rows, malformed) if file.suffix == ".jsonl" else ParquetRows(file, rows)


class JsonlRows:
    """The objects of a .jsonl; a position is the byte offset of a line.

    Args:
        file: the file.
        rows: which of its objects; ends may count from the end.
        malformed: as for `read_file`.
    """

    def __init__(self, file: Path, rows: slice, malformed: list[str] | None) -> None:
        self._file, self._rows, self._malformed = file, rows, malformed
        self._handle: Any = None

    @property
    def num_bytes(self) -> int:
        """Size of the rows in memory, roughly: that of the whole file."""
        return self._file.stat().st_size

    def scan(self, *, remember: bool = False) -> Iterator[Row]:
        """The rows in order, one at a time.

        Args:
            remember: `read` will be called; the file stays open for it.
        """
        if remember:
            self._handle = self._file.open("rb")
        skipped: list[str] | None = None if self._malformed is None else []
        yield from _sliced(lambda: self._lines(self._malformed), self._rows, lambda: self._count(skipped))

    def _count(self, malformed: list[str] | None) -> int:
        return sum(1 for _ in self._lines(malformed))

    def _lines(self, malformed: list[str] | None) -> Iterator[Row]:
        end = 0
        with self._file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                start, end = end, end + len(line)
                if not line.strip():
                    continue
                place = self.place_of(number)
                try:
                    yield Row(place, number, start, len(line), object_of_line(line, place))
                except UsageError as error:
                    if malformed is None:
                        raise
                    malformed += error.messages

    def place_of(self, number: int) -> str:
        """The place of a line."""
        return f"{self._file}:{number}"

    def read(self, position: int, size: int) -> dict[str, Any]:
        """A row that `scan(remember=True)` has passed; any thread may ask."""
        return object_of_line(os.pread(self._handle.fileno(), size, position), f"{self._file}, byte {position}")


class ParquetRows:
    """The rows of a .parquet; a position is an offset in a temporary file that `scan` writes.

    Args:
        file: the file.
        rows: which of its rows; ends may count from the end.
    """

    def __init__(self, file: Path, rows: slice) -> None:
        import pyarrow
        import pyarrow.parquet as parquet

        self._file, self._rows = file, rows
        try:
            with parquet.ParquetFile(file) as table:
                self._num_rows = table.metadata.num_rows
                groups = range(table.num_row_groups)
                self.num_bytes = sum(table.metadata.row_group(i).total_byte_size for i in groups)
        except pyarrow.ArrowInvalid as error:
            raise UsageError(f"{file} is no parquet file: {error}") from error
        self._spool: Any = None

    def scan(self, *, remember: bool = False) -> Iterator[Row]:
        """The rows in order, a batch of 256 in memory at a time.

        Args:
            remember: `read` will be called; the rows go to a nameless file in the directory for temporary files.
        """
        if remember:
            self._spool = tempfile.TemporaryFile(prefix="slime-rows-")  # noqa: SIM115 (open for the life of this object)
        yield from _sliced(self._batches, self._rows, lambda: self._num_rows)
        if remember:
            self._spool.flush()

    def _batches(self) -> Iterator[Row]:
        import pyarrow.parquet as parquet

        number, position = itertools.count(1), 0
        with parquet.ParquetFile(self._file, pre_buffer=False) as table:
            for batch in table.iter_batches(batch_size=_BATCH, use_threads=False):
                for row in batch.to_pylist():
                    size = 0
                    if self._spool is not None:
                        size = self._spool.write(pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL))
                    this = next(number)
                    yield Row(self.place_of(this), this, position, size, row)
                    position += size

    def place_of(self, number: int) -> str:
        """The place of a row."""
        return f"{self._file}: row {number}"

    def read(self, position: int, size: int) -> dict[str, Any]:
        """A row that `scan(remember=True)` has passed; any thread may ask, once the scan is over."""
        # this process wrote it to a file without a name
        return cast("dict[str, Any]", pickle.loads(os.pread(self._spool.fileno(), size, position)))  # nosec B301


def _sliced(rows: Any, wanted: slice, count: Any) -> Iterator[Row]:
    """Those of the rows; an end that counts from the end costs counting them."""
    start, stop = wanted.start, wanted.stop
    if (start or 0) < 0 or (stop or 0) < 0:
        start, stop, _ = wanted.indices(count())
    return itertools.islice(rows(), start, max(stop, start or 0) if stop is not None else None)


class MalformedLine(UsageError):
    """A line is no JSON object."""


def object_of_line(line: bytes, place: str) -> dict[str, Any]:
    """The object of a line of a .jsonl.

    Raises:
        MalformedLine: it has none.
    """
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise MalformedLine(f"{place}: not valid JSON ({error}); each line must be one JSON object") from error
    if not isinstance(row, dict):
        raise MalformedLine(f"{place}: a {type(row).__name__}, but each line must be one JSON object")
    return row


# ---- what a row holds


def prompt_of(row: dict[str, Any], where: str, key: str) -> Any:
    """The prompt of a row: a text, or messages.

    Raises:
        UsageError: it has none, or something else.
    """
    if key not in row:
        raise UsageError(f"{where}: no key {key!r} (--input-key); the keys are {', '.join(map(repr, row)) or 'none'}")
    prompt = row[key]
    is_messages = isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt)
    if not is_messages and not (isinstance(prompt, str) and prompt):
        raise UsageError(
            f"{where}: {key!r} must be a text or a list of messages with a 'role', not {str(prompt)[:80]!r}"
        )
    return prompt


def messages_of(row: dict[str, Any], where: str, key: str, kinds: dict[str, str]) -> list[dict[str, Any]]:
    """The prompt of a row as messages, with what the row holds beside its text (`kinds`: --multimodal-keys).

    Raises:
        UsageError: there are more placeholders than things, or fewer; or images without --multimodal-keys.
    """
    prompt = prompt_of(row, where, key)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if kinds:
        return with_parts(messages, row, kinds, where)
    if image_parts(messages):
        raise UsageError(
            f"{where}: {key!r} has images, and without --multimodal-keys a run reads text alone; give "
            '--multimodal-keys \'{"image": "<field of the images>"}\' and a model that sees images'
        )
    return messages


def label_of(row: dict[str, Any], where: str, key: str) -> Any:
    """The label of a row.

    Raises:
        UsageError: it has none.
    """
    if row.get(key) is None:
        have = "it is null" if key in row else f"the keys are {', '.join(map(repr, row))}"
        raise UsageError(f"{where}: no label under {key!r} (--label-key); {have}")
    return row[key]


def object_of(value: Any, where: str, key: str, *, kind: type) -> Any:
    """A value that may be stored as JSON text (parquet files often do)."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise UsageError(f"{where}: {key!r} is a text that is no JSON ({error})") from error
    if not isinstance(value, kind):
        raise UsageError(f"{where}: {key!r} must be a JSON {kind.__name__}, not {str(value)[:80]!r}")
    return value


def metadata_of(row: dict[str, Any], where: str, key: str) -> dict[str, Any]:
    """A copy of the metadata of a row; {} where it has none.

    Raises:
        UsageError: it is no object.
    """
    value = row.get(key)
    return {} if value is None or value == "" else dict(object_of(value, where, key, kind=dict))


def check_data_file(
    path: str,
    *,
    prompt_key: str,
    label_key: str | None = None,
    metadata_key: str | None = None,
    multimodal_keys: dict[str, str] | None = None,
    skip_malformed: bool = False,
) -> int:
    """Read a whole data file once, before anything starts.

    Args:
        path: file, with an optional slice.
        prompt_key, label_key, metadata_key: columns that every row must have; None = not looked at.
        multimodal_keys: as many things as placeholders are in every row, and files of images are there.
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
        messages = messages_of(row, where, prompt_key, multimodal_keys or {})
        for part in image_parts(messages) if multimodal_keys else ():
            if missing := missing_image(part.get("image")):
                raise UsageError(f"{where}: there is no image {missing}")
        if label_key is not None:
            label_of(row, where, label_key)
        if metadata_key is not None:
            metadata_of(row, where, metadata_key)
    if not count:
        raise UsageError(no_rows(path, malformed))
    return count


def no_rows(path: str, malformed: list[str] | None) -> str:
    """What to say of a file without rows."""
    return f"data file {path} has no rows" + (f" but {len(malformed)} malformed lines" if malformed else "")
