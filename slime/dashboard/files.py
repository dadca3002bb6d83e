"""Lines of files that grow, and paths that stay inside the directories that were given.

Whoever writes a run may write anything: a line may be cut short, too long, not UTF-8 or no JSON, and a name may be a
link that leads elsewhere. Such lines are counted and left out; such files are not there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

CHUNK_BYTES = 8 << 20
LONGEST_LINE = 16 << 20


class Lines:
    """The JSON objects that were appended to a file since the last read.

    Args:
        path: may not exist yet.
        root: the file, links followed, must lie in it.

    Attributes:
        num_broken: lines that were left out.
        generation: grows when the file was replaced or cut, and reading began again.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self._path, self._root = path, root
        self._offset, self._inode, self._rest = 0, 0, b""
        self.num_broken = self.generation = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the objects of the lines that are complete now."""
        found: list[dict[str, Any]] = []
        try:
            status = self._path.stat()
            if (status.st_ino, status.st_size) == (self._inode, self._offset):
                return found  # a page looks each second: most looks end here
            if not is_inside(self._path, self._root):
                return found
            with self._path.open("rb") as file:
                self._begin_again_if_replaced(os.fstat(file.fileno()))
                file.seek(self._offset)
                while chunk := file.read(CHUNK_BYTES):
                    self._offset += len(chunk)
                    found += self._objects(chunk)
        except OSError:
            return found  # it is not there, or not ours to read
        return found

    def _begin_again_if_replaced(self, status: os.stat_result) -> None:
        if status.st_ino != self._inode or status.st_size < self._offset:
            self.generation += bool(self._inode)
            self._inode, self._offset, self._rest, self.num_broken = status.st_ino, 0, b"", 0

    def _objects(self, chunk: bytes) -> list[dict[str, Any]]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            self._rest = b"{"  # what follows of this line is no object
        found = [parsed for line in lines if line.strip() and (parsed := parse_object(line)) is not None]
        self.num_broken += sum(bool(line.strip()) for line in lines) - len(found)
        return found


def parse_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None where it holds something else."""
    try:
        value = json.loads(line.decode(errors="replace"), parse_int=_int)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _int(text: str) -> int | str:
    """Return a whole number; as text one that is too large for any step, size or clock."""
    return int(text) if len(text) <= 18 else text


def is_inside(path: Path, root: Path) -> bool:
    """Return whether a path, links followed, lies in a directory.

    Args:
        path: may not exist.
        root: resolved.
    """
    try:
        return path.resolve().is_relative_to(root)
    except (OSError, RuntimeError, ValueError):  # a circle of links, or a name that no file system has
        return False


def read_text(path: Path, root: Path, *, limit: int) -> str | None:
    """Return the beginning of a text file, at most `limit` bytes; None where it is not there or leads elsewhere."""
    if not is_inside(path, root):
        return None
    try:
        with path.open("rb") as file:
            return file.read(limit).decode(errors="replace")
    except OSError:
        return None


def read_object(path: Path, root: Path, *, limit: int = CHUNK_BYTES) -> dict[str, Any]:
    """Return the JSON object that a file holds; empty where there is none."""
    text = read_text(path, root, limit=limit)
    return (parse_object(text.encode()) if text else None) or {}


def tail(path: Path, root: Path, *, limit: int = 16 << 10) -> str | None:
    """Return the last `limit` bytes of a text file; None where it is not there or leads elsewhere."""
    if not is_inside(path, root):
        return None
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            return file.read(limit).decode(errors="replace")
    except OSError:
        return None
