"""Files of rollouts: their names, writing one whole, which are kept (--keep-rollouts), and dumps to be replayed later.

A dump is a dict that torch.save wrote. It is written under another name first, so that a run that is killed leaves no
half of one. What stands in a dump, its writer knows (slime.ray.rollout.manager, slime.training.reports); samples of a
rollout are read here, for a dump of another kind is the mistake to be expected.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime.processes.directories import open_new
from slime.utils.errors import UsageError, line_of_full_disk
from slime.utils.processing_utils import encode_image_for_rollout_engine, open_image
from slime.utils.types import Sample

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)

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


def save_dump(path: str | Path, data: dict[str, Any]) -> None:
    """Write a dump and the directories above it; numpy arrays become tensors, which can be read without trust.

    Only this user can read and write it: it holds prompts and answers, and whoever loads one with trust runs its code.
    One for which the disk has no room is left out, and an error says so: no run depends on it.
    """
    import torch

    target = Path(path)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_new(unfinished) as file:  # torch's own says of a full disk only that it could not write
            torch.save(plain(data), file)
        unfinished.replace(target)
    except (OSError, RuntimeError) as error:
        if (problem := line_of_full_disk(error)) is None:
            raise
        logger.error("%s is not written (%s); the run goes on without it", target, problem)
    finally:
        unfinished.unlink(missing_ok=True)


def load_dump(
    path: str | Path, *, trusted: bool = False, remedy: str = "trust it, or do not open it"
) -> dict[str, Any]:
    """Read a dump onto the CPU.

    Args:
        path: the file.
        trusted: where it holds objects other than tensors and plain data (what user code put on its samples),
            make them, which runs code that the file names. Without it such a file is refused.
        remedy: what the user can do about that, for the error.

    Raises:
        UsageError: there is no such file, it is no dump, or it would have to be trusted.
    """
    import torch

    if not os.path.isfile(path):
        raise UsageError(f"there is no file {path}")
    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        if not zipfile.is_zipfile(path) or not isinstance(error, pickle.UnpicklingError):
            raise UsageError(f"{path} is no dump: torch.load cannot read it") from error
        if not trusted:
            raise UsageError(
                f"{path} holds more than tensors and plain data, and reading that runs code: {remedy} "
                f"({reason_of(error)})"
            ) from error
        logger.warning("%s holds more than tensors and plain data: it is read as a file of your own", path)
        # the caller trusts it
        found = torch.load(path, weights_only=False, map_location="cpu")  # nosec B614
    if not isinstance(found, dict):
        raise UsageError(f"{path} is no dump: it holds a {type(found).__name__}, not a dict")
    return found


def load_samples(path: str | Path, *, option: str) -> list[Sample]:
    """The samples of a file that --save-debug-rollout-data wrote.

    Args:
        path: the file; what it holds is trusted.
        option: the flag that named it, for the error.

    Raises:
        UsageError: there is no such file, or it is no dump of a rollout.
    """
    try:
        dump = load_dump(path, trusted=True)
    except UsageError as error:
        raise UsageError(f"{option}: {error}; dump it with --save-debug-rollout-data") from error
    samples = dump.get("samples")
    if not isinstance(samples, list) or "dp_shards" in dump:
        raise UsageError(f"{option}: {path} is no dump of a rollout's samples (--save-debug-rollout-data)")
    return samples_of([samples])[0]


def subsample(samples: list[Sample], share: float | None) -> list[Sample]:
    """A share of the samples, half of it from each end; all where `share` is None.

    Example:
        >>> subsample(list("abcdefgh"), 0.5)
        ['a', 'b', 'g', 'h']
    """
    if share is None:
        return samples
    wanted = max(1, int(len(samples) * share))
    head = wanted // 2
    return samples[:head] + samples[len(samples) - (wanted - head) :]


def plain(value: Any, made: dict[int, Any] | None = None) -> Any:
    """The same data without numpy and PIL: arrays as tensors, scalars as Python's, images as PNG files, which lose
    nothing. What several samples share they share still (`made`: what became of an object, by its id): pixels are by
    far the largest part of a rollout with images.
    """
    import numpy as np
    import torch
    from PIL import Image

    made = {} if made is None else made
    if isinstance(value, dict) and type(value) is dict:
        return {key: plain(entry, made) for key, entry in value.items()}
    if type(value) in (list, tuple):
        # token lists are long and hold only numbers: they are looked at, not rebuilt
        if all(type(entry) in (int, float, str, bool) for entry in value):
            return value
        return type(value)(plain(entry, made) for entry in value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        if id(value) not in made:
            made[id(value)] = torch.from_numpy(np.ascontiguousarray(value))
        return made[id(value)]
    if isinstance(value, Image.Image) and value.mode == "RGB":
        if id(value) not in made:
            made[id(value)] = encode_image_for_rollout_engine(value)
        return made[id(value)]
    return value.item() if isinstance(value, np.generic) else value


def with_plain_images(fields: dict[str, Any], made: dict[int, Any]) -> dict[str, Any]:
    """The fields of a sample, of which those of images are as `plain` writes them; `made` as there."""
    return fields | {name: plain(fields[name], made) for name in ("multimodal_inputs", "multimodal_train_inputs")}


def samples_of(groups: Iterable[Iterable[dict[str, Any]]]) -> list[list[Sample]]:
    """Groups of samples from what `plain` made of their dicts; what they share they share again."""
    made: dict[Any, Any] = {}
    return [[_sample_of(fields, made) for fields in group] for group in groups]


def _sample_of(fields: dict[str, Any], made: dict[Any, Any]) -> Sample:
    sample = Sample.from_dict(fields)
    given, arrays = sample.multimodal_inputs or {}, sample.multimodal_train_inputs
    if images := given.get("images"):
        key = tuple(map(id, images))
        if key not in made:
            opened = [open_image(image) if isinstance(image, str) else image for image in images]
            made[key] = {**given, "images": opened}
        sample.multimodal_inputs = made[key]
    if arrays is not None:
        sample.multimodal_train_inputs = {
            name: made.setdefault(id(value), value.numpy()) if hasattr(value, "numpy") else value
            for name, value in arrays.items()
        }
    return sample


def reason_of(error: Exception) -> str:
    """The line of torch's long message that names the type."""
    lines = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line]
    return lines[0] if lines else type(error).__name__
