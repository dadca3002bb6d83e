"""What a run keeps of each rollout's samples, and its reader, `RolloutRecords`. Under `<output_dir>/rollouts/` are:

    00012.parquet               samples of training rollout 12, one row each (`schema.SAMPLES`)
    eval_00012.parquet          samples of the evaluation at step 12
    00012.train.rank0.parquet   what trainer rank 0 computed for its share (`schema.TRAINER`)

A file appears under its name when it is complete. A list of samples costs the columns that it shows; one sample costs
its row group, of at most 128 samples. The reader keeps nothing in memory but footers. Files may be removed at any time
(--keep-rollouts); one that is open can still be read.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from slime.checkpoints.rollout_files import DIRECTORY, record_files, samples_path
from slime.observability.rollout_records.schema import PER_TOKEN, SAMPLES, TEXT_COLUMNS, TOKEN_COLUMNS

LIST_COLUMNS = tuple(name for name in SAMPLES.names if name not in (*TOKEN_COLUMNS, *TEXT_COLUMNS))
"""Columns of a list: numbers, and both ends of the texts (`prompt_preview`, `response_preview`)."""
_JSON = ("messages", "reward_parts", "times", "metadata")


class RolloutRecords:
    """The records of one run.

    Args:
        directory: the run's --output-dir.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory) / DIRECTORY

    def rollouts(self) -> list[int]:
        """Return the training rollouts whose samples are there, in order."""
        return sorted(file.rollout_id for file in record_files(self.directory) if file.kind == "samples")

    def evals(self) -> list[int]:
        """Return the steps of the evaluations whose samples are there, in order."""
        return sorted(file.rollout_id for file in record_files(self.directory) if file.kind == "eval")

    def open(self, rollout_id: int, *, evaluation: bool = False) -> RolloutFile:
        """Open a rollout, or the evaluation at a step.

        Raises:
            FileNotFoundError: there is none, or no longer.
            ValueError: the file is no such record.
        """
        path = samples_path(self.directory, rollout_id, evaluation=evaluation)
        kind = None if evaluation else "train"
        files = record_files(self.directory)
        trainer = sorted(file.path for file in files if file.kind == kind and file.rollout_id == rollout_id)
        return RolloutFile(path, trainer_paths=trainer)


class RolloutFile:
    """The samples of one rollout, or what a trainer's rank computed for its share of them. Threads may share it.

    Args:
        path: of the samples.
        trainer_paths: of the trainer's columns, as far as they are written.
    """

    def __init__(self, path: Path, *, trainer_paths: Sequence[Path] = ()) -> None:
        self.path = path
        try:
            self._file = parquet.ParquetFile(path, memory_map=True)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path} is no record of a rollout: {error}") from error
        counts = (self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups))
        self._starts = list(itertools.accumulate(counts, initial=0))[:-1]  # the first row of each row group
        self._trainer_paths = trainer_paths
        self._lock = threading.Lock()  # pyarrow's file ends the process where threads read it at once

    @property
    def num_rows(self) -> int:
        """Samples in the file."""
        return int(self._file.metadata.num_rows)

    @property
    def has_trainer_columns(self) -> bool:
        """Whether a trainer has written what it computed."""
        return bool(self._trainer_paths)

    def table(self, columns: Sequence[str] = LIST_COLUMNS) -> pa.Table:
        """Return columns of all samples."""
        with self._lock:
            return self._file.read(columns=list(columns))

    def rows(self, start: int, stop: int, columns: Sequence[str] = LIST_COLUMNS) -> pa.Table:
        """Return columns of the samples in rows `start` to `stop` (not included); reads only their row groups."""
        start, stop = max(0, start), min(stop, self.num_rows)
        if start >= stop:
            return self._file.schema_arrow.empty_table().select(list(columns))
        first, last = self._group_of(start), self._group_of(stop - 1)
        with self._lock:
            table = self._file.read_row_groups(range(first, last + 1), columns=list(columns))
        return table.slice(start - self._starts[first], stop - start)

    def sample(self, row: int) -> dict[str, Any]:
        """Return one sample with all that is known of it.

        Args:
            row: its place in the file, which is `sample_id` where every group was recorded.

        Returns:
            every column of `schema.SAMPLES` by name: token columns as lists, JSON as data; `messages` the list of
            messages and `tools` the tools, None for a prompt that is plain text. Also "rank" and the columns
            `schema.PER_TOKEN` of the trainer, [response_length] each; None where a trainer has none.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= row < self.num_rows:
            raise IndexError(f"{self.path} has {self.num_rows} samples, and no row {row}")
        found = self.rows(row, row + 1, SAMPLES.names).to_pylist()[0]
        for name in _JSON:
            found[name] = None if found[name] is None else json.loads(found[name])
        conversation = found["messages"] or {}
        found["messages"], found["tools"] = conversation.get("messages"), conversation.get("tools")
        return found | self.of_trainer(found["sample_id"], found["index"])

    def of_trainer(self, sample_id: int, index: int | None) -> dict[str, Any]:
        """Return "rank" and the columns `schema.PER_TOKEN` of a sample; None where a trainer has none."""
        # A hook may have put it in another place, so its index decides.
        place = (sample_id, sample_id if index is None else index)
        found = self._trainer_rows.get(place) or self._trainer_rows.get((None, index))
        if found is None:
            return dict.fromkeys(("rank", *PER_TOKEN))
        file, row = found
        columns: dict[str, Any] = file.rows(row, row + 1, ("rank", *PER_TOKEN)).to_pylist()[0]
        return columns

    @functools.cached_property
    def _trainer_rows(self) -> dict[tuple[int | None, int | None], tuple[RolloutFile, int]]:
        """(place or None, index) -> the row of the first such sample in a file of the trainer's ranks."""
        rows: dict[tuple[int | None, int | None], tuple[RolloutFile, int]] = {}
        for file in map(RolloutFile, self._trainer_paths):
            keys = file.table(("sample_id", "index"))
            for row, (place, index) in enumerate(zip(*(column.to_pylist() for column in keys.columns), strict=True)):
                rows.setdefault((place, index), (file, row))
                rows.setdefault((None, index), (file, row))
        return rows

    def _group_of(self, row: int) -> int:
        return bisect.bisect_right(self._starts, row) - 1
