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
import itertools
import json
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
        trainer = () if evaluation else self._trainer_paths(rollout_id)
        return RolloutFile(path, trainer_paths=trainer)

    def _trainer_paths(self, rollout_id: int) -> Sequence[Path]:
        files = record_files(self.directory)
        return sorted(file.path for file in files if file.kind == "train" and file.rollout_id == rollout_id)


class RolloutFile:
    """The samples of one rollout.

    Args:
        path: of the samples.
        trainer_paths: of the trainer's columns, as far as they are written.
    """

    def __init__(self, path: Path, *, trainer_paths: Sequence[Path] = ()) -> None:
        self.path = path
        self._file = _open(path)
        self._starts = _starts(self._file)
        self._trainer_paths = trainer_paths
        self._trainer: _TrainerColumns | None = None

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
        return self._file.read(columns=list(columns))

    def rows(self, start: int, stop: int, columns: Sequence[str] = LIST_COLUMNS) -> pa.Table:
        """Return columns of the samples in rows `start` to `stop` (not included); reads only their row groups."""
        start, stop = max(0, start), min(stop, self.num_rows)
        if start >= stop:
            return self._file.schema_arrow.empty_table().select(list(columns))
        first, last = self._group_of(start), self._group_of(stop - 1)
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
        if self._trainer is None:
            self._trainer = _TrainerColumns(self._trainer_paths)
        return self._trainer.of(sample_id, index)

    def _group_of(self, row: int) -> int:
        return bisect.bisect_right(self._starts, row) - 1


class _TrainerColumns:
    """Where each sample is in the files of the trainer's ranks."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: list[tuple[parquet.ParquetFile, list[int]]] = []
        self._by_place: dict[int, tuple[int, int, int]] = {}  # place -> (index, file, row)
        self._by_index: dict[int, tuple[int, int]] = {}
        for path in paths:
            self._add(_open(path))

    def _add(self, file: parquet.ParquetFile) -> None:
        number = len(self._files)
        self._files.append((file, _starts(file)))
        keys = file.read(columns=["sample_id", "index"])
        for row, (place, index) in enumerate(zip(*(column.to_pylist() for column in keys.columns), strict=True)):
            self._by_place[place] = (index, number, row)
            self._by_index.setdefault(index, (number, row))

    def of(self, sample_id: int, index: int | None) -> dict[str, Any]:
        """The trainer's columns of a sample; a hook may have put it in another place, so its index decides."""
        known_index, *where = self._by_place.get(sample_id, (None, 0, 0))
        if known_index is None or known_index != (sample_id if index is None else index):
            moved = None if index is None else self._by_index.get(index)
            if moved is None:
                return dict.fromkeys(("rank", *PER_TOKEN))
            where = list(moved)
        number, row = where
        file, starts = self._files[number]
        group = bisect.bisect_right(starts, row) - 1
        table = file.read_row_group(group, columns=["rank", *PER_TOKEN])
        found: dict[str, Any] = table.slice(row - starts[group], 1).to_pylist()[0]
        return found


def _open(path: Path) -> parquet.ParquetFile:
    try:
        return parquet.ParquetFile(path, memory_map=True)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no record of a rollout: {error}") from error


def _starts(file: parquet.ParquetFile) -> list[int]:
    """The first row of each row group."""
    counts = (file.metadata.row_group(i).num_rows for i in range(file.num_row_groups))
    return list(itertools.accumulate(counts, initial=0))[:-1]
