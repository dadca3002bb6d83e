"""rollouts/*.parquet as tables and samples (written by slime.observability.rollout_records).

The columns of a table that a list shows are read once and kept for the newest few files. Everything long (texts,
tokens, log-probs) is read a row group at a time, when somebody opens a sample or searches. pyarrow is
imported on first use.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from slime.dashboard.files import is_inside

DIRECTORY = "rollouts"
NAME = re.compile(r"(eval_)?(\d+)\.parquet")


@dataclass(frozen=True)
class RolloutFile:
    """One file of samples.

    Attributes:
        name: without its ending: "00012" or "eval_00012".
        rollout_id: the rollout.
        is_eval: its samples are answers of an evaluation.
        size, changed: bytes, and seconds since 1970.
    """

    name: str
    rollout_id: int
    is_eval: bool
    path: Path
    size: int
    changed: float


class RolloutFiles:
    """The files of samples of one run.

    Args:
        directory: of the run.
        root: files that lead out of it are left out.
    """

    def __init__(self, directory: Path, root: Path) -> None:
        self._directory, self._root = directory / DIRECTORY, root
        self._seen: tuple[int, ...] = ()
        self.files: dict[str, RolloutFile] = {}
        self.version = 0
        self.num_samples: int | None = None

    def refresh(self) -> None:
        """Look which files there are."""
        found = {}
        for path in sorted(self._directory.glob("*.parquet")) if is_inside(self._directory, self._root) else ():
            match = NAME.fullmatch(path.name)
            if match and is_inside(path, self._root):
                status = path.stat()
                found[path.stem] = RolloutFile(
                    path.stem, int(match[2]), bool(match[1]), path, status.st_size, status.st_mtime
                )
        if found != self.files:
            self.files = found
            self.version += 1
