"""A text file to which lines are appended, and without which a run can go on: a full disk costs lines, not the run."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from slime.utils.full_disk import line_of_full_disk

logger = logging.getLogger(__name__)


class AppendedLines:
    """The file at `path`, made by the first line; a reader sees each line at once, and no part of one.

    Where the disk is full that is said once, and once how many lines were lost when there is room again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_lost = 0

    def write(self, line: str) -> None:
        """Append a line; its end is added.

        Raises:
            OSError: it cannot be written, and not for want of room.
        """
        try:
            self._append(f"{line}\n".encode())
        except OSError as error:
            if (problem := line_of_full_disk(error)) is None:
                raise
            if self._num_lost == 0:
                logger.error("%s cannot be written (%s); the run goes on without its lines", self._path, problem)
            self._num_lost += 1
            return
        self._say_what_is_lost("it is written again")

    def finish(self) -> None:
        """No line follows."""
        self._say_what_is_lost("the disk was full until the end")

    def _append(self, content: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:  # a buffer would keep what found no room, for later
            size = os.fstat(file.fileno()).st_size
            left = memoryview(content)
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:
                if os.fstat(file.fileno()).st_size > size:
                    os.ftruncate(file.fileno(), size)  # no half line stays
                raise

    def _say_what_is_lost(self, now: str) -> None:
        if self._num_lost:
            logger.error("%s lacks %d lines for which there was no room; %s", self._path, self._num_lost, now)
        self._num_lost = 0
