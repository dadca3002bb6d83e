"""Write an HF directory whose tensors are known by name, dtype and shape before any of them is made.

Shards are planned first, so that a file's header can be written before its tensors, each of which goes to its place as
soon as it is made: memory holds one tensor a thread, not a shard. The directory has the suffix ".partial" until all of
it is on the disk. Started again with the same plan, a writer keeps the shards that are complete there. It knows no
names of models.
"""

from __future__ import annotations

import concurrent.futures as cf
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slime.utils.conversion.file_copy import Segment, copy_into
from slime.utils.conversion.partial_dir import (
    PLAN_FILE,
    check_room,
    close_partial,
    growing_alone,
    lacks_its_end,
    old_of,
    open_partial,
    said_of_disk,
    take_back,
)
from slime.utils.conversion.progress import Bar, run_in_threads
from slime.utils.conversion.raw_tensors import NAMES, TensorInfo, bytes_of
from slime.utils.errors import UsageError
from slime.utils.manifest import to_disk
from slime.weights.safetensors_files import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 5 * 1024**3
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


@dataclass(frozen=True)
class Job:
    """Tensors that are made together.

    Attributes:
        outputs: name -> what is written.
        make: returns them, in that order; may be called in any thread.
        stored: where the bytes of each lie in files already, in that order, or None where they have to be made.
    """

    outputs: Mapping[str, TensorInfo]
    make: Callable[[], Sequence[torch.Tensor]]
    stored: Callable[[], Sequence[Sequence[Segment]] | None] | None = None

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
        made_from: what the tensors come from (paths, flags): a partial directory of anything else starts over.
        replaces: whether a directory that exists is replaced at the end.
    """

    path: Path
    flag: str
    assets_from: Path | None = None
    config: Mapping[str, Any] | None = None
    shard_bytes: int = SHARD_BYTES
    made_from: Sequence[str] = ()
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
    if target.exists() and not replaces and not lacks_its_end(target):
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
    shards: list[list[Job]] = []
    size, names = 0, set[str]()
    for job in jobs:
        if twice := names & job.outputs.keys():
            raise UsageError(f"the tensor {min(twice)} would be written twice; is the input two checkpoints in one?")
        names |= job.outputs.keys()
        if not shards or size + job.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(job)
        size += job.num_bytes
    return shards


def write_hf(target: HfTarget, jobs: Sequence[Job], *, num_threads: int = 1) -> int:
    """Make every tensor and the directory; returns the bytes of the tensors.

    Raises:
        UsageError: nothing to write, not enough room on the disk, or another process writes the same directory. What
            is complete stays in the partial directory, and the same call goes on from there.
    """
    if not jobs:
        raise UsageError(f"{target.flag} {target.path}: there is no tensor to write.")
    shards = plan_shards(jobs, target.shard_bytes)
    files = shard_names(len(shards))
    total = sum(job.num_bytes for job in jobs)
    try:
        with growing_alone(target.partial, target.path, replaces=target.replaces):
            _open_partial(target, shards)
            _write_shards(target, files, shards, num_threads)
            _finish(target, files, shards, total)
    except OSError as error:
        raise said_of_disk(error, target.partial) from error
    return total


def _write_shards(target: HfTarget, files: Sequence[str], shards: Sequence[Sequence[Job]], num_threads: int) -> None:
    """Write those shards that are not there yet."""
    todo = [(f, shard) for f, shard in zip(files, shards, strict=True) if not (target.partial / f).is_file()]
    total = sum(job.num_bytes for shard in shards for job in shard)
    left = sum(job.num_bytes for _, shard in todo for job in shard)
    check_room(target.partial, left, target.flag)
    # A shard goes to the disk while the next one is made; at most two are on the way.
    with Bar(f"writing {target.path.name}", total, done=total - left) as bar, cf.ThreadPoolExecutor(1) as syncing:
        synced: list[cf.Future[None]] = []
        for file, shard in todo:
            growing = write_shard(target.partial / file, shard, num_threads=num_threads, bar=bar)
            for earlier in synced[-1:]:
                earlier.result()
            synced.append(syncing.submit(_complete, growing, target.partial / file))
        for one in synced:
            one.result()


def shard_names(count: int) -> list[str]:
    """The file names of so many shards."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def write_shard(path: Path, jobs: Sequence[Job], *, num_threads: int, bar: Bar) -> Path:
    """Write the file that `path` is to be: its header, then each tensor at its place; returns its name until then."""
    growing = path.with_name(path.name + ".tmp")
    front, places = make_header({name: info for job in jobs for name, info in job.outputs.items()})
    handle = os.open(growing, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _write_at(handle, memoryview(front), 0)
        run_in_threads(jobs, partial(_write_job, handle, places), num_threads=num_threads, bar=bar)
    finally:
        os.close(handle)
    return growing


def _complete(growing: Path, path: Path) -> None:
    """See that a file is on the disk, then give it its name."""
    to_disk(growing)
    growing.rename(path)


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
    """Make the tensors of a job and write them, or copy them from where they are; returns their bytes."""
    segments = job.stored() if job.stored is not None else None
    if segments is not None:
        for name, there in zip(job.outputs, segments, strict=True):
            copy_into(there, handle, places[name])
        return job.num_bytes
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


def _open_partial(target: HfTarget, shards: Sequence[Sequence[Job]]) -> None:
    """Make the partial directory, or keep one of the same plan with the shards that are complete in it."""
    tensors = [
        {name: [NAMES[i.dtype], list(i.shape)] for job in one for name, i in job.outputs.items()} for one in shards
    ]
    plan = [list(target.made_from), tensors]
    take_back(target.partial, target.path, plan, replaces=target.replaces)
    open_partial(target.partial, plan)
    for left in target.partial.glob("*.tmp"):
        left.unlink()


def _finish(target: HfTarget, files: Sequence[str], shards: Sequence[Sequence[Job]], total: int) -> None:
    """Write what is not weights, see that all is on the disk, then give the directory its name."""
    if target.assets_from is not None:
        copy_assets(target.assets_from, target.partial)
    if target.config is not None:
        (target.partial / "config.json").write_text(json.dumps(target.config, indent=2) + "\n")
    if len(files) > 1:
        weight_map = {
            name: file for file, shard in zip(files, shards, strict=True) for job in shard for name in job.outputs
        }
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target.partial / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for path in (*target.partial.iterdir(), target.partial):
        to_disk(path)
    close_partial(target.partial, target.path, replaces=target.replaces)


def copy_assets(source: str | Path, target: Path) -> None:
    """Copy the files of an HF directory that are not weights (config, tokenizer, chat template, generation config)."""
    for file in sorted(Path(source).iterdir()):
        is_weights = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and file.name != PLAN_FILE:
            shutil.copyfile(file, target / file.name)  # not the mode: a model of all may be read-only
