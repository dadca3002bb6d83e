"""Write a directory of weights, which has its name only when it is complete; threads make its tensors one by one.

The shards of an HF directory are planned first, from names, dtypes and shapes, so that a file's header can be written
before its tensors, each of which goes to its place as soon as it is made: memory holds one tensor a thread, not a
shard (safetensors' save_file holds it twice). The directory grows under the suffix ".partial"; where anything fails,
that is removed.
"""

from __future__ import annotations

import concurrent.futures as cf
import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from tqdm import tqdm

from slime.checkpoints.paths import to_disk
from slime.conversion.reader import NAMES, TensorInfo, bytes_of
from slime.utils.errors import UsageError
from slime.utils.misc import chunks_of_size
from slime.weights.names import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 5 * 1024**3
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
ToDo = TypeVar("ToDo")


@dataclass(frozen=True)
class Job:
    """Tensors that are made together.

    Attributes:
        outputs: name -> what is written.
        make: returns them, in that order; may be called in any thread.
    """

    outputs: Mapping[str, TensorInfo]
    make: Callable[[], Sequence[torch.Tensor]]

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(info.num_bytes for info in self.outputs.values())


@dataclass(frozen=True)
class HfTarget:
    """Where and how an HF directory is written.

    Attributes:
        path: the directory to make.
        flag: that named it, for error sentences.
        assets_from: an HF directory whose files other than weights are copied; None: there are only weights.
        config: what to write in place of the copied config.json.
        shard_bytes: where a new shard starts.
        replaces: whether a directory that exists is replaced at the end.
    """

    path: Path
    flag: str
    assets_from: Path | None = None
    config: Mapping[str, Any] | None = None
    shard_bytes: int = SHARD_BYTES
    replaces: bool = False

    @property
    def partial(self) -> Path:
        """Where it grows."""
        return partial_of(self.path)


def partial_of(path: Path) -> Path:
    """The name that an HF directory has until it is complete."""
    return path.with_name(path.name + ".partial")


def check_target(target: Path, *, flag: str, sources: Mapping[str, str | Path | None], replaces: bool = False) -> None:
    """Look at an output path before anything is read.

    Args:
        target: directory to make.
        flag: that named it.
        sources: flag -> input path; None where it is not given.
        replaces: whether an existing directory may go.

    Raises:
        UsageError: it is one of the inputs or around one, it exists, has no name, or cannot be made.
    """
    if target.name in ("", ".."):
        raise UsageError(f"{flag} {target} has no name of its own; name a directory that is to be made.")
    for place in (target, *target.parents):
        if place.is_symlink() and not place.exists():
            raise UsageError(f"{flag} {target}: {place} is a link to nothing; remove it, or make what it names.")
    for other, source in sources.items():
        if source is None:
            continue
        theirs = Path(source).resolve()
        for ours, name in (
            (target, f"{flag} {target}"),
            (partial_of(target), f"{partial_of(target)}, where it grows,"),
            (old_of(target), f"{old_of(target)}, where what it replaces lies until it is complete,"),
        ):
            if ours.resolve() == theirs:
                raise UsageError(f"{name} is {other}; name another directory, the input would be overwritten.")
            if ours.resolve() in theirs.parents:
                raise UsageError(f"{name} has {other} {source} in it; name a directory beside it.")
    if target.exists() and not replaces:
        raise UsageError(f"{flag} {target} exists; remove it, or name another directory.")
    if target.exists() and not target.is_dir():
        raise UsageError(f"{flag} {target} is a file; name a directory.")
    parent = next(place for place in target.resolve().parents if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UsageError(f"{flag} {target} cannot be made: {parent} is no directory that can be written to.")


def plan_shards(jobs: Sequence[Job], shard_bytes: int) -> list[list[Job]]:
    """Jobs in their order, as many to a shard as fit into it; one that is larger has a shard of its own.

    Raises:
        UsageError: two jobs make a tensor of one name.
    """
    names = set[str]()
    for job in jobs:
        if twice := names & job.outputs.keys():
            raise UsageError(f"the tensor {min(twice)} would be written twice; is the input two checkpoints in one?")
        names |= job.outputs.keys()
    return list(chunks_of_size(jobs, shard_bytes, lambda job: job.num_bytes))


def write_hf(target: HfTarget, jobs: Sequence[Job], *, num_threads: int = 1) -> int:
    """Make every tensor and the directory; returns the bytes of the tensors.

    Raises:
        UsageError: nothing to write, not enough room on the disk, or another process writes the same directory.
    """
    if not jobs:
        raise UsageError(f"{target.flag} {target.path}: there is no tensor to write.")
    shards = plan_shards(jobs, target.shard_bytes)
    files = dict(zip(shard_names(len(shards)), shards, strict=True))
    total = sum(job.num_bytes for job in jobs)
    with growing(target.partial):
        check_room(target.partial, total, target.flag)
        with progress(f"writing {target.path.name}", total) as bar:
            for file, shard in files.items():
                write_shard(target.partial / file, shard, num_threads=num_threads, bar=bar)
        _write_rest(target, files, total)
        put_in_place(target.partial, target.path, replaces=target.replaces)
    return total


def shard_names(count: int) -> list[str]:
    """The file names of so many shards."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def write_shard(path: Path, jobs: Sequence[Job], *, num_threads: int, bar: tqdm[NoReturn]) -> None:
    """Write a safetensors file: its header, then each tensor at its place."""
    front, places = make_header({name: info for job in jobs for name, info in job.outputs.items()})
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _write_at(handle, memoryview(front), 0)
        run_in_threads(jobs, partial(_write_job, handle, places), num_threads=num_threads, bar=bar)
    finally:
        os.close(handle)


def make_header(tensors: Mapping[str, TensorInfo]) -> tuple[bytes, dict[str, int]]:
    """The front of a safetensors file with these tensors one after the other, and the byte at which each begins."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, info in tensors.items():
        end = offset + info.num_bytes
        entries[name] = {"dtype": NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    places = {name: start + entry["data_offsets"][0] for name, entry in entries.items() if name != "__metadata__"}
    return len(text).to_bytes(8, "little") + text, places


def _write_job(handle: int, places: Mapping[str, int], job: Job) -> int:
    """Make the tensors of a job and write them; returns their bytes."""
    for (name, info), tensor in zip(job.outputs.items(), job.make(), strict=True):
        found = TensorInfo(tensor.dtype, tuple(tensor.shape))
        assert found == info, f"{name} was planned as {info} and made as {found}"
        if tensor.numel():
            _write_at(handle, bytes_of(tensor.contiguous()), places[name])
    return job.num_bytes


def _write_at(handle: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done:], offset + done)


def _write_rest(target: HfTarget, files: Mapping[str, Sequence[Job]], total: int) -> None:
    """Write what is not weights, and see that everything is on the disk."""
    if target.assets_from is not None:
        copy_assets(target.assets_from, target.partial)
    if target.config is not None:
        (target.partial / "config.json").write_text(json.dumps(target.config, indent=2) + "\n")
    if len(files) > 1:
        weight_map = {name: file for file, shard in files.items() for job in shard for name in job.outputs}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target.partial / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for path in (*target.partial.iterdir(), target.partial):
        to_disk(path)


def copy_assets(source: str | Path, target: Path) -> None:
    """Copy the files of an HF directory that are not weights (config, tokenizer, chat template, generation config)."""
    for file in sorted(Path(source).iterdir()):
        is_weights = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not is_weights:
            shutil.copyfile(file, target / file.name)  # not the mode: a model of all may be read-only


@contextmanager
def growing(partial: Path) -> Iterator[None]:
    """Make a directory for one process alone; remove it where what is done in it fails.

    Raises:
        UsageError: there is one of that name, or the disk is full.
    """
    try:
        partial.mkdir(parents=True)
    except FileExistsError as error:
        raise UsageError(
            f"{partial}, where the result grows, exists: another process is writing it now, or was killed. Wait for "
            "its end, or remove it if nothing writes there."
        ) from error
    with ExitStack() as undo, naming_full_disk(partial):
        undo.callback(shutil.rmtree, partial, ignore_errors=True)
        yield
        undo.pop_all()


def old_of(final: Path) -> Path:
    """The name that what is replaced has until the new one has its name."""
    return final.with_name(f".{final.name}.old")


def put_in_place(partial: Path, final: Path, *, replaces: bool) -> None:
    """Rename a finished directory; one of the same name is deleted after that, if it may be.

    Args:
        partial: the finished one.
        final: its name.
        replaces: whether what has that name goes.

    Raises:
        UsageError: something has the name, and it is not to be replaced.
        OSError: it cannot be; whatever had the name still has it.
    """
    old = old_of(final)
    if replaces:
        _remove(old)
        if os.path.lexists(final):
            final.rename(old)
    elif os.path.lexists(final):
        raise UsageError(f"{final} came into being meanwhile; remove it, or name another directory.")
    try:
        partial.rename(final)
        to_disk(final.parent)
    except OSError:
        if not partial.exists():
            final.rename(partial)
        if replaces and os.path.lexists(old):
            old.rename(final)
        raise
    if replaces:
        _remove(old)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def check_room(directory: Path, num_bytes: int, flag: str) -> None:
    """Raise UsageError where the disk of an existing directory has no room for so many bytes more."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise UsageError(
            f"{flag}: {num_bytes / 1e9:.2f} GB are still to be written to {directory}, where {free / 1e9:.2f} GB are "
            "free; make room, or name a directory on another disk."
        )


@contextmanager
def naming_full_disk(directory: Path) -> Iterator[None]:
    """Turn the system's error about a full disk into a sentence.

    Raises:
        UsageError: the disk is full; names the directory.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UsageError(f"the disk of {directory} is full; make room and run the same command again.") from error


def usual_threads() -> int:
    """Threads unless told otherwise: the cores that this process may use, at most 4, for each holds a tensor."""
    return min(4, len(os.sched_getaffinity(0)))


def progress(what: str, total: int) -> tqdm[NoReturn]:
    """Return a bar of so many bytes on stderr; where that is no terminal, it is drawn twice a minute."""
    interval = 0.5 if sys.stderr.isatty() else 30
    return tqdm(desc=what, total=total, unit="B", unit_scale=True, mininterval=interval, file=sys.stderr)


def run_in_threads(
    jobs: Iterable[ToDo], work: Callable[[ToDo], int], *, num_threads: int, bar: tqdm[NoReturn]
) -> None:
    """Call work(job) for every job, `num_threads` at a time, in about their order; it returns bytes for the bar.

    Raises:
        what the first job that failed raised; those that have not begun are left out.
    """
    with cf.ThreadPoolExecutor(num_threads, thread_name_prefix="convert") as threads:
        running = [threads.submit(work, job) for job in jobs]
        try:
            for one in cf.as_completed(running):
                bar.update(one.result())
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
