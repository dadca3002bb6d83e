"""Names of the files of rollouts, writing one whole, and which of them are kept (--keep-rollouts)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from slime.processes.directories import open_new

if TYPE_CHECKING:
    import pyarrow

DIRECTORY = "rollouts"
ROWS_PER_GROUP = 128
"""Samples that are read together when one is looked at."""
DEFAULT_KEEP = "last:20,every:50,max-gb:5"
PARTIAL = ".partial"
_NAME = re.compile(r"(?P<eval>eval_)?(?P<id>\d{5,})(?P<train>\.train(\.rank\d+)?)?\.parquet")

Kind = Literal["samples", "eval", "train"]


@dataclass(frozen=True)
class RecordFile:
    """One file of a rollout.

    Attributes:
        path: where it is.
        rollout_id: the rollout, or the step of an evaluation.
        kind: "samples" of a training rollout, "eval", or "train", the trainer's columns.
    """

    path: Path
    rollout_id: int
    kind: Kind


def samples_path(directory: Path, rollout_id: int, *, evaluation: bool = False) -> Path:
    """Return the file of a rollout's samples."""
    return directory / f"{'eval_' if evaluation else ''}{rollout_id:05d}.parquet"


def trainer_path(directory: Path, rollout_id: int, rank: int) -> Path:
    """Return the file of what a trainer rank computed."""
    return directory / f"{rollout_id:05d}.train.rank{rank}.parquet"


def record_files(directory: Path) -> Iterator[RecordFile]:
    """Yield the complete files of a directory, in no order; none where there is no directory."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        if match := _NAME.fullmatch(name):
            kind: Kind = "eval" if match["eval"] else "train" if match["train"] else "samples"
            yield RecordFile(directory / name, int(match["id"]), kind)


def write_tables(path: Path, schema: pyarrow.Schema, tables: Iterable[pyarrow.Table], *, plain: Sequence[str]) -> None:
    """Write the rows of some tables so that readers see all of them or nothing; only this user can read the file.

    Args:
        path: its directory is made.
        schema: of every table.
        tables: taken one by one, so that a rollout is never in memory twice.
        plain: columns whose values rarely repeat: a dictionary of them would cost time and save nothing.

    Raises:
        OSError: it cannot be written; nothing of it stays.
    """
    import pyarrow.parquet as parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    lists = {field.name for field in schema if str(field.type).startswith("list")}
    repeating = [f"{name}.list.element" if name in lists else name for name in schema.names if name not in plain]
    try:
        with (
            open_new(unfinished) as file,
            parquet.ParquetWriter(
                file,
                schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=repeating,
                write_statistics=False,  # nobody skips row groups by them, and footers stay small
            ) as writer,
        ):
            for table in tables:
                writer.write_table(table, row_group_size=ROWS_PER_GROUP)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@dataclass(frozen=True)
class KeepRule:
    """Which rollouts' files stay (--keep-rollouts).

    Attributes:
        last: newest training rollouts; None: all.
        every: also each whose id is a multiple of it; None: no others.
        max_bytes: of all files together; the oldest rollouts go first, evaluations after them, the newest file never.
        records: False: nothing is written at all.
    """

    last: int | None = None
    every: int | None = None
    max_bytes: int | None = None
    records: bool = True

    @classmethod
    def parse(cls, text: str) -> KeepRule:
        """Read the flag's value.

        Raises:
            ValueError: it is neither "all", "none" nor a list of last:N, every:N and max-gb:X.

        Example:
            >>> KeepRule.parse("last:20,every:50,max-gb:5")
            KeepRule(last=20, every=50, max_bytes=5000000000, records=True)
            >>> KeepRule.parse("none").records
            False
        """
        if text in ("all", "none"):
            return cls(records=text == "all")
        parts = [part.strip().partition(":")[::2] for part in text.split(",")]
        values: dict[str, str] = dict(parts)
        if len(values) != len(parts) or not values.keys() <= {"last", "every", "max-gb"}:
            raise ValueError(f"{text!r} is not all, none or a list of last:N, every:N and max-gb:X")
        numbers = {name: _positive(value, whole=name != "max-gb") for name, value in values.items()}
        if numbers.keys() == {"every"}:
            numbers["last"] = 1  # the one that is looked at now
        last, every, gigabytes = (numbers.get(name) for name in ("last", "every", "max-gb"))
        return cls(
            last=None if last is None else int(last),
            every=None if every is None else int(every),
            max_bytes=None if gigabytes is None else int(gigabytes * 1e9),
        )

    def surplus(self, sizes: dict[RecordFile, int]) -> list[RecordFile]:
        """Return the files that go, of those with these sizes in bytes.

        Evaluations are few and are compared over a whole run, so only `max_bytes` removes them.
        """
        by_rollout: dict[int, list[RecordFile]] = {}
        for file in sizes:
            if file.kind != "eval":
                by_rollout.setdefault(file.rollout_id, []).append(file)
        ids = sorted(by_rollout)
        newest = ids if self.last is None else ids[len(ids) - min(self.last, len(ids)) :]
        stays = {i for i in ids if i in set(newest) or (self.every is not None and i % self.every == 0)}
        gone = [file for i in ids if i not in stays for file in by_rollout[i]]
        if self.max_bytes is None:
            return gone
        total = sum(sizes.values()) - sum(sizes[file] for file in gone)
        evals = sorted((file for file in sizes if file.kind == "eval"), key=lambda file: file.rollout_id)
        order = [by_rollout[i] for i in ids[:-1] if i in stays] + [[file] for file in evals[:-1]]
        for files in order:
            if total <= self.max_bytes:
                break
            gone += files
            total -= sum(sizes[file] for file in files)
        return gone


def _positive(text: str, *, whole: bool) -> float:
    number = int(text) if whole else float(text)
    if not 0 < number < float("inf"):
        raise ValueError(f"{text} is not above 0")
    return number


def prune(directory: Path, rule: KeepRule) -> None:
    """Remove the files that `rule` does not keep."""
    sizes: dict[RecordFile, int] = {}
    for file in record_files(directory):
        try:
            sizes[file] = file.path.stat().st_size
        except FileNotFoundError:  # another writer prunes, too
            continue
    for file in rule.surplus(sizes):
        file.path.unlink(missing_ok=True)


def forget(directory: Path, rollout_id: int) -> None:
    """Remove what an earlier attempt has left of a training rollout that is made again, and of all after it.

    The trainer's columns go too, and so do evaluations of weights that the new attempt does not have yet: to
    `KeepRule` they would be the newest, and what is made now the first to go.
    """
    for file in record_files(directory):
        if file.rollout_id >= rollout_id + (file.kind == "eval"):
            file.path.unlink(missing_ok=True)
