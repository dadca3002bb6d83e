"""Prompts that are larger than memory, or elsewhere: rows in blocks, shuffled by blocks, read when asked for.

A stream is a .jsonl or .parquet file, a directory of such files, or a data set that Hugging Face `datasets` saved
(`save_to_disk`); a path or an fsspec URL (`s3://bucket/file.jsonl`). A block is 256 lines, a row group, or a record
batch. In memory are where each block begins (12 bytes a block) and the rows of one window.

An epoch's order follows from its seed alone. The blocks are permuted; then each window, which is as many of the blocks
in this order as have `window_rows` rows, is permuted by rows. So row i of an epoch is found without reading those
before it, and a run goes on at the very row. What a shuffle of the whole file has besides: two rows of one block are
at most a window apart.

The blocks of a .jsonl are found by reading it once; `<file>.index.npz` keeps them, where it can be written.
"""

from __future__ import annotations

import json
import logging
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from slime.utils.errors import UsageError
from slime.utils.files.rows import label_of, object_of_line, prompt_of

logger = logging.getLogger(__name__)
BLOCK_LINES = 256
WINDOW_ROWS = 16_384
_CHUNK = 8 * 2**20
_SUFFIXES = (".jsonl", ".parquet")
_UNREADABLE = (OSError, ValueError, ImportError)  # Arrow's errors are such, too
Place = tuple[str, dict[str, Any] | None]
"""("file:line", its fields); None for an empty line."""


def is_stream(path: str) -> bool:
    """Whether a path can only be read as a stream: a URL, or a directory."""
    return "://" in path or os.path.isdir(path)


class JsonlBlocks:
    """A .jsonl: blocks of 256 lines.

    Attributes:
        sizes: [blocks] rows of each.
    """

    def __init__(self, fs: Any, path: str, shown: str) -> None:
        self._fs, self._path, self._shown = fs, path, shown
        self._starts, num_lines = self._kept() or self._indexed()
        count = len(self._starts) - 1
        self.sizes = np.full(count, BLOCK_LINES, np.uint32)
        if count:
            self.sizes[-1] = num_lines - BLOCK_LINES * (count - 1)

    @cached_property
    def _stamp(self) -> list[str]:
        info = self._fs.info(self._path)
        return [str(info.get("size")), str(info.get("mtime") or info.get("ETag") or info.get("LastModified") or "")]

    def _kept(self) -> tuple[np.ndarray, int] | None:
        """The index beside a local file, unless the file is another by now."""
        index = Path(self._path + ".index.npz")
        if not _is_local(self._fs) or not index.is_file():
            return None
        try:
            with np.load(index) as kept:
                return (kept["starts"], int(kept["num_lines"])) if kept["stamp"].tolist() == self._stamp else None
        except (*_UNREADABLE, EOFError, KeyError, zipfile.BadZipFile):  # cut off, or another program's
            return None

    def _indexed(self) -> tuple[np.ndarray, int]:
        """(start of each block and the end of the last, lines)."""
        starts, num_lines, position, is_open = [np.zeros(1, np.int64)], 0, 0, False
        with self._fs.open(self._path, "rb") as file:
            while chunk := file.read(_CHUNK):
                ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + 1
                lines = np.arange(num_lines + 1, num_lines + 1 + len(ends))
                starts.append(position + ends[lines % BLOCK_LINES == 0])
                num_lines, position, is_open = num_lines + len(ends), position + len(chunk), chunk[-1:] != b"\n"
        num_lines += is_open
        found = np.concatenate(starts)[: -(-num_lines // BLOCK_LINES)]
        index = np.append(found, position)
        if _is_local(self._fs):
            self._keep(index, num_lines)
        return index, num_lines

    def _keep(self, index: np.ndarray, num_lines: int) -> None:
        temporary = f"{self._path}.index.{os.getpid()}.npz"
        try:
            np.savez(temporary, starts=index, num_lines=num_lines, stamp=self._stamp)
            os.replace(temporary, self._path + ".index.npz")
        except OSError as error:
            logger.info("the index of %s is not kept, and is made again by the next run: %s", self._shown, error)

    def rows(self, block: int) -> list[bytes]:
        """The lines of a block."""
        start, end = int(self._starts[block]), int(self._starts[block + 1])
        lines: list[bytes] = self._fs.cat_file(self._path, start=start, end=end).split(b"\n")
        return lines[: int(self.sizes[block])]

    def place(self, block: int, row: int, read: Any) -> Place:
        """The object of a line."""
        place = f"{self._shown}:{block * BLOCK_LINES + row + 1}"
        return place, object_of_line(read, place) if read.strip() else None


class TableBlocks:
    """Tables of Arrow, of a .parquet or of a data set; a row is (table, number) until it is asked for.

    Args:
        shown: the file, for a reader.
        sizes: rows of each.
        table: reads a block.
    """

    def __init__(self, shown: str, sizes: Sequence[int], table: Callable[[int], Any]) -> None:
        self._shown, self.sizes, self._table = shown, np.array(sizes, np.uint32), table
        self._before = np.cumsum(np.array([0, *sizes]))

    def rows(self, block: int) -> list[tuple[Any, int]]:
        """The rows of a block."""
        table = self._table(block)
        return [(table, number) for number in range(table.num_rows)]

    def place(self, block: int, row: int, read: Any) -> Place:
        """The fields of a row."""
        table, number = read
        return f"{self._shown}: row {self._before[block] + row + 1}", table.slice(number, 1).to_pylist()[0]


def parquet_blocks(fs: Any, path: str, shown: str) -> TableBlocks:
    """A .parquet: its row groups."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(fs.open(path, "rb"), pre_buffer=False)
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    return TableBlocks(shown, sizes, lambda block: file.read_row_group(block, use_threads=False))


def arrow_blocks(path: str) -> TableBlocks:
    """A file of a data set that was saved by `datasets`: its record batches, mapped from disk."""
    import pyarrow as pa

    batches = pa.ipc.open_stream(pa.memory_map(path)).read_all().to_batches()
    return TableBlocks(path, [batch.num_rows for batch in batches], batches.__getitem__)


class Stream:
    """The rows of all files, in the order of an epoch.

    Args:
        path: a file, a directory or a URL; a slice is refused.
        flag: as errors call what named it.
        window_rows: rows that are permuted together, and held in memory.

    Raises:
        UsageError: it cannot be read, or has no rows.
    """

    def __init__(self, path: str, *, flag: str = "--prompt-data", window_rows: int = WINDOW_ROWS) -> None:
        self._path, self._flag, self._window_rows = path, flag, window_rows
        with readable(path, flag):
            fs, _, _ = _place_of(path)
            self._files = [_open(fs, file, shown) for file, shown in _data_files(path)]
        self._first = np.cumsum([0, *(len(file.sizes) for file in self._files)])
        self._sizes = np.concatenate([file.sizes for file in self._files])
        self._num_rows = int(self._sizes.sum())
        if not self._num_rows:
            raise UsageError(f"{flag} {path} has no rows")
        self.order(None)

    def __len__(self) -> int:
        return self._num_rows

    def order(self, seed: int | None) -> None:
        """Put the rows into the order of a seed; None is that of the files."""
        self._seed, self._window = seed, -1
        count = len(self._sizes)
        blocks = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)
        self._blocks = blocks.astype(np.uint32)
        ends = np.cumsum(self._sizes[self._blocks].astype(np.int64))
        every = np.arange(self._window_rows, ends[-1], self._window_rows)
        cuts = np.append(np.searchsorted(ends, every), count - 1) if seed is not None else np.arange(count)
        self._last = np.unique(cuts)  # the last block of each window, in the epoch's order
        self._ends = ends[self._last]

    def row(self, index: int) -> Place:
        """Row `index` of the epoch."""
        window = int(np.searchsorted(self._ends, index, side="right"))
        if window != self._window:
            self._read(window)
        start = int(self._ends[window - 1]) if window else 0
        block, row, read = self._held[self._inner[index - start]]
        file = int(np.searchsorted(self._first, block, side="right")) - 1
        return self._files[file].place(block - int(self._first[file]), row, read)

    def _read(self, window: int) -> None:
        first = int(self._last[window - 1]) + 1 if window else 0
        self._held: list[tuple[int, int, Any]] = []
        for block in map(int, self._blocks[first : int(self._last[window]) + 1]):
            file = int(np.searchsorted(self._first, block, side="right")) - 1
            with readable(self._path, self._flag):
                rows = self._files[file].rows(block - int(self._first[file]))
            self._held += [(block, number, read) for number, read in enumerate(rows)]
        rng = np.random.default_rng([self._seed or 0, window])
        count = len(self._held)
        self._inner = (np.arange(count) if self._seed is None else rng.permutation(count)).tolist()
        self._window = window


@contextmanager
def readable(path: str, flag: str = "") -> Iterator[None]:
    """Turn what a file system or a format says into one sentence with the flag and the path."""
    is_url = "://" in path
    # File systems of URLs have errors of their own: botocore's of lacking credentials is no OSError.
    kinds: type[Exception] | tuple[type[Exception], ...] = Exception if is_url else _UNREADABLE
    try:
        yield
    except UsageError:
        raise
    except kinds as error:
        said = str(error) or type(error).__name__
        where = "; see docs/remote_files.md" if is_url else ""
        raise UsageError(f"{f'{flag} {path}'.strip()} cannot be read: {said}{where}") from error


def check_first_row(path: str, prompt_key: str, label_key: str | None) -> dict[str, Any]:
    """The first row of a stream, which has a prompt, and a label where one is asked for.

    Raises:
        UsageError: it has not, or cannot be read.
    """
    place, row = _first_row(path)  # the caller names the flag
    prompt_of(row, place, prompt_key)
    if label_key is not None:
        label_of(row, place, label_key)
    return row


def _first_row(path: str) -> tuple[str, dict[str, Any]]:
    with readable(path):
        fs, _, _ = _place_of(path)
        for file, shown in _data_files(path):
            if file.endswith(".jsonl"):
                with fs.open(file, "rb") as lines:
                    for number, line in enumerate(lines, start=1):
                        if line.strip():
                            place = f"{shown}:{number}"
                            return place, object_of_line(line, place)
            else:
                blocks = _open(fs, file, shown)
                if len(blocks.sizes):
                    place, row = blocks.place(0, 0, blocks.rows(0)[0])
                    return place, row or {}
    raise UsageError(f"{path} has no rows")


def _is_local(fs: Any) -> bool:
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(fs, LocalFileSystem)


def _place_of(path: str) -> tuple[Any, str, str]:
    """(file system, path in it, what a path in it begins with for a reader)."""
    import fsspec

    fs, inside = fsspec.core.url_to_fs(path)
    return fs, inside, path.partition("://")[0] + "://" if "://" in path else ""


def _data_files(path: str) -> Iterator[tuple[str, str]]:
    """(path in its file system, path for a reader) of each file of a stream, in order."""
    if path.endswith("]") and "@[" in path:
        raise UsageError(f"{path}: a stream is read as a whole; leave the slice out")
    fs, inside, scheme = _place_of(path)
    if not fs.isdir(inside):
        if not fs.exists(inside):
            raise FileNotFoundError("there is no such file or directory")
        if not inside.endswith(_SUFFIXES):
            raise ValueError("its name ends with neither .jsonl nor .parquet, and it is no directory")
        yield inside, scheme + inside
        return
    if fs.exists(f"{inside}/dataset_dict.json"):
        with fs.open(f"{inside}/dataset_dict.json") as file:
            splits = ", ".join(json.load(file)["splits"])
        raise ValueError(f"it holds several splits; add the name of one of {splits}")
    if fs.exists(f"{inside}/state.json"):
        yield from _saved_files(fs, inside)
        return
    files = [file for file in sorted(fs.find(inside)) if file.endswith(_SUFFIXES)]
    if not files:
        raise FileNotFoundError("the directory has no .jsonl and no .parquet file")
    yield from ((file, scheme + file) for file in files)


def _saved_files(fs: Any, directory: str) -> Iterator[tuple[str, str]]:
    if not _is_local(fs):
        raise ValueError("a data set saved by `datasets` is mapped from a local disk; copy it here")
    with fs.open(f"{directory}/state.json") as file:
        state = json.load(file)
    if state.get("_indices_data_files"):
        raise ValueError("its rows are a selection; save it again after flatten_indices()")
    yield from ((f"{directory}/{entry['filename']}",) * 2 for entry in state["_data_files"])


def _open(fs: Any, file: str, shown: str) -> JsonlBlocks | TableBlocks:
    if file.endswith(".arrow"):
        return arrow_blocks(file)
    return JsonlBlocks(fs, file, shown) if file.endswith(".jsonl") else parquet_blocks(fs, file, shown)
