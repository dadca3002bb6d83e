"""How an engine of ours loads a version of the weights from files: load format "slime" of /update_weights_from_disk.

SGLang's own formats differ in two ways that matter during training. A file that is cut short ends its scheduler: what
fails while loading is tried again from the same files, outside any `try`. And they prepare layers once more after
loading, which fp8 layers do not survive. Here the directory is looked at first, every byte of it, once for an engine
(or where the host's copy is made): what was changed on its way is not loaded. Weights are loaded as the other
transports load them, and whatever is wrong, on any tensor-parallel rank, is the answer of all.

With "slime:DIR" the host's own copy of the weights in DIR is brought to the version first, which may be a delta, and
is loaded from: of a delta the tensors that changed, and those without which SGLang would not load them. A model whose
load is nothing but copies, and which holds what the delta was made from, is not loaded: the elements that changed are
written to its tensors.
"slime-copy:DIR" only brings the copy there, in the process that answers requests: the engine generates meanwhile, and
a load finds it done.

The copy is an HF directory `<root>/checkpoint`, with the run and the version that it is of beside it. Every rank of
every engine of a host comes with each version, and the first one does the work. A delta is applied to the version that
it was made from, known by its id (numbers come again where trainers begin again), and every tensor has to come out
with the checksum that it had at the sender; otherwise the delta is refused, and the copy is of no version until a
whole one comes. A copy belongs to the engines of one run for as long as one of them lives, whichever trainers it has.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import shutil
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from slime.backends.sglang_utils.bucket_load import ElementCopies
from slime.backends.sglang_utils.engine_client import COPY_FORMAT, LOAD_FORMAT
from slime.checkpoints.paths import MANIFEST_FILE
from slime.checkpoints.paths import what_is_wrong as manifest_problem
from slime.processes.directories import make_own_directory
from slime.processes.wait import lock_file
from slime.utils.errors import UsageError
from slime.weights.names import files_of, read_header, read_index, with_partners

if TYPE_CHECKING:
    import torch

    from slime.conversion.reader import RawTensors

logger = logging.getLogger(__name__)

CHANGES_FILE = "changes.safetensors"
"""Beside a host's copy: of the tensors of the last delta the positions that changed and their new values."""
FLAG = "--update-weight-local-checkpoint-dir"
MAX_THREADS = 16
PIECE = 2**20
"""Bytes of a tensor that are changed at a time; elements are not cut."""
LOCK_DEADLINE_S = 1800.0  # another engine of the node copies a whole checkpoint
_held: dict[Path, IO[str]] = {}
"""Root -> the file whose lock says that an engine of this process uses it."""


def install() -> None:
    """Add the format to the server that runs in this process. Imports SGLang."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    stock = WeightUpdater.update_weights_from_disk
    of_model: weakref.WeakKeyDictionary[Any, ElementCopies] = weakref.WeakKeyDictionary()

    def update_weights_from_disk(
        self: Any, model_path: str, load_format: str, *values: Any, **keywords: Any
    ) -> tuple[bool, str]:
        name, _, local_dir = str(load_format).partition(":")
        if name != LOAD_FORMAT:
            return stock(self, model_path, load_format, *values, **keywords)
        model = self.get_model()
        loaded = of_model.setdefault(model, ElementCopies(weakref.proxy(model)))
        problem = load(Path(model_path), model.load_weights, Path(local_dir) if local_dir else None, loaded)
        return problem is None, problem or "Succeeded to update model weights."

    rename = TokenizerManager._update_model_path_info

    def stay_named(self: Any, model_path: str, load_format: str) -> None:
        if (
            str(load_format).partition(":")[0] != LOAD_FORMAT
        ):  # a version's directory goes away, and is not the name of the model
            rename(self, model_path, load_format)

    serve = TokenizerManager.update_weights_from_disk

    async def bring_copy_or_serve(self: Any, obj: Any, request: Any = None) -> tuple[bool, str, int]:
        name, _, local_dir = str(obj.load_format).partition(":")
        if name != COPY_FORMAT:
            served: tuple[bool, str, int] = await serve(self, obj, request)
            return served
        problem = await asyncio.to_thread(bring_copy, Path(obj.model_path), Path(local_dir))
        return problem is None, problem or "The copy of this host is of this version.", 0

    WeightUpdater.update_weights_from_disk = update_weights_from_disk
    TokenizerManager.update_weights_from_disk = bring_copy_or_serve
    TokenizerManager._update_model_path_info = stay_named


def load(
    directory: Path,
    load_weights: Callable[[Iterator[tuple[str, torch.Tensor]]], Any],
    local_dir: Path | None = None,
    loaded: ElementCopies | None = None,
) -> str | None:
    """Load a version into the model, on every tensor-parallel rank at once.

    Args:
        directory: of the version.
        load_weights: takes (HF name, full tensor).
        local_dir: where this host has its own copy of the weights, which is brought to the version first.
        loaded: of the model; with it elements that changed are written alone where that is possible.

    Returns:
        what is wrong, on this rank or on another; None when every rank has loaded all of it.
    """
    problem = agreed(_missing(directory))
    problem = problem or agreed(_changed(directory, local_dir))
    source = directory
    if problem is None and local_dir is not None:
        problem = agreed(_brought(directory, local_dir))
        source = LocalCheckpoint(local_dir).directory
    if problem is not None:
        return problem
    try:
        index = read_index(directory)
        if local_dir is None or loaded is None:
            load_weights(tensors_of(source, with_partners(index["weight_map"])))
        elif not loaded.take(local_dir / CHANGES_FILE, index):
            tensors = dict(tensors_of(source, with_partners(index["weight_map"])))
            loaded.load(tensors, lambda: load_weights(iter(tensors.items())), index["metadata"]["id"])
    except Exception as error:  # the answer, in place of the scheduler's end
        logger.exception("loading %s failed", directory)
        problem = f"loading {directory} failed: {type(error).__name__}: {error}"
    return agreed(problem)


def bring_copy(directory: Path, local_dir: Path) -> str | None:
    """Bring this host's own copy of the weights to a version.

    Returns:
        what is wrong; None when the copy is there.
    """
    return _missing(directory) or _brought(directory, local_dir)


def _brought(directory: Path, local_dir: Path) -> str | None:
    try:
        LocalCheckpoint(local_dir).bring_to(directory)
    except (OSError, ValueError, KeyError) as error:
        logger.exception("%s was refused", directory)
        return str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
    return None


def _changed(directory: Path, local_dir: Path | None) -> str | None:
    """What of a version is not what was written; a host's copy is looked at when it is made."""
    if local_dir is not None or not _is_first():
        return None
    return manifest_problem(directory / MANIFEST_FILE)


def _missing(directory: Path) -> str | None:
    """Why a version is not here as a whole, going by the sizes of its files."""
    if directory.is_dir():
        return manifest_problem(directory / MANIFEST_FILE, "sizes")
    return f"there is no {directory} on this host; is its parent the same directory as on the trainer's?"


def tensors_of(directory: Path, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, tensor) of these tensors of a directory, mapped from the files."""
    from safetensors import safe_open

    for file in files_of(directory):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                if name in names:
                    yield name, opened.get_tensor(name)


def _is_first() -> bool:
    """Whether this is the first tensor-parallel rank, or the only process."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return True
    from sglang.srt.distributed import get_tp_group

    return bool(get_tp_group().rank_in_group == 0)


def agreed(problem: str | None) -> str | None:
    """The first problem of a tensor-parallel rank, on all of them (collective)."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return problem
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return problem
    found: list[str | None] = [None] * group.world_size
    dist.all_gather_object(found, problem, group=group.cpu_group)
    return next(filter(None, found), None)


class LocalCheckpoint:
    """The copy below one directory.

    Args:
        root: made if it does not exist.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "checkpoint"

    def bring_to(self, version_dir: Path) -> Path:
        """Make the copy one of a version, unless another process has done it.

        It stays that until the trainer, who waits for every engine, writes the next one.

        Args:
            version_dir: as the trainer wrote it: a whole checkpoint or a delta.

        Returns:
            the HF directory of the copy.

        Raises:
            UsageError: it cannot be brought there.
        """
        wanted = read_index(version_dir)["metadata"]
        self.root.parent.mkdir(parents=True, exist_ok=True)
        try:
            make_own_directory(self.root.resolve(), forbidden=0o022)
        except PermissionError as error:
            raise UsageError(
                f"{FLAG} {self.root}: {error}, who could replace the weights; give a directory that only you can write"
            ) from None
        with (self.root / ".lock").open("a") as lock:
            lock_file(lock, f"another engine to finish with {self.root}", LOCK_DEADLINE_S)
            self._hold(wanted["run"])
            if self._state().get("id") != wanted["id"]:
                self._bring(version_dir, wanted)
        return self.directory

    def _hold(self, run: str) -> None:
        """Use the copy for a run from now on, unless engines of another run do, or it is none of ours."""
        users = self.root / ".users"
        if self.directory.exists() and not users.exists():
            raise UsageError(
                f"{self.directory} would be overwritten, and no run of slime has made it; give another {FLAG}"
            )
        file = _held.get(self.root) or users.open("a")
        if self._state().get("run") != run:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"{FLAG} {self.root} is in use by the engines of another run; give each run a directory of its own"
                ) from None
            self._set_state(run)
        lock_file(file, f"the use of {self.root}", LOCK_DEADLINE_S, shared=True)
        _held[self.root] = file

    def _bring(self, version_dir: Path, wanted: dict[str, Any]) -> None:
        base, state = wanted.get("base_version"), self._state()
        if base is not None and (state.get("version"), state.get("id")) != (base, wanted["base_id"]):
            held = state.get("version") or "no whole version"
            if held == base:
                held = f"another version {base}"
            raise UsageError(
                f"{version_dir} is a delta from version {base}, but {self.root} holds {held}: a version is missing "
                "there"
            )
        self._set_state(wanted["run"])
        if base is None:
            shutil.rmtree(self.directory, ignore_errors=True)
            try:
                shutil.copytree(version_dir, self.directory)
            except OSError as error:
                raise UsageError(f"{version_dir} cannot be copied to {FLAG} {self.root}: {error}") from None
            _check(self.directory)
            (self.directory / MANIFEST_FILE).unlink()  # deltas change what it is about
        else:
            _check(version_dir)
            self._apply(version_dir, wanted)
        self._set_state(wanted["run"], wanted["version"], wanted["id"])

    def _apply(self, version_dir: Path, wanted: dict[str, Any]) -> None:
        """Change every tensor of a delta in its file."""
        from slime.conversion.reader import RawTensors

        copy = RawTensors(self.directory, flag=FLAG)
        headers = {file: read_header(file) for file in files_of(version_dir)}
        deltas = [(file, header, name) for file, header in headers.items() for name in header.tensors]
        deltas.sort(key=lambda delta: copy.info(delta[2]).num_bytes, reverse=True)  # the largest is not begun last
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="delta") as threads:
            tasks = {delta[2]: threads.submit(_apply_one, *delta, copy, wanted) for delta in deltas}
            found = {name: task.result() for name, task in tasks.items()}
        self._list(found, wanted["id"])

    def _list(self, found: dict[str, Any], version_id: str) -> None:
        """Leave the elements that changed to the engines, which write them alone; no list if of a tensor too many
        did."""
        import numpy as np
        from safetensors.numpy import save_file

        file = self.root / CHANGES_FILE
        file.unlink(missing_ok=True)
        if None in found.values():
            return
        arrays: dict[str, Any] = {}
        for name, parts in found.items():
            where, values = (np.concatenate(kind) for kind in zip(*parts, strict=True))
            arrays |= {f"{name}:where": where.view(np.int32), f"{name}:values": values}
        save_file(arrays, file, metadata={"id": version_id})

    def _state(self) -> dict[str, Any]:
        try:
            found = json.loads((self.root / "state.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _set_state(self, run: str, version: int | None = None, version_id: str | None = None) -> None:
        """Without a version it is not known what the copy holds."""
        partial = self.root / "state.json.partial"
        partial.write_text(json.dumps({"run": run, "version": version, "id": version_id}))
        partial.replace(self.root / "state.json")


def _check(directory: Path) -> None:
    if problem := manifest_problem(directory / MANIFEST_FILE):
        raise UsageError(problem)


def _apply_one(delta_file: Path, header: Any, name: str, copy: RawTensors, wanted: dict[str, Any]) -> Any:
    """Change one tensor in its file, a piece after the other: memory that is used again is in the caches.

    Returns:
        `Changes.found`.
    """
    import numpy as np

    from slime.weights.delta import Changes, hasher

    start, end = header.tensors[name]["data_offsets"]
    with delta_file.open("rb") as stream:
        stream.seek(header.data_start + start)
        delta = stream.read(end - start)
    (file, begin), info = copy.place(name), copy.info(name)
    size, digest, buffer = info.num_bytes, hasher(wanted["checksum_format"]), np.empty(PIECE, np.uint8)
    try:
        changes = Changes(delta, size, itemsize=info.dtype.itemsize, encoding=wanted["delta_encoding"])
        with file.open("r+b", buffering=0) as data:
            for at in range(0, size, PIECE):
                piece = buffer[: min(PIECE, size - at)]
                if os.preadv(data.fileno(), [piece.data], begin + at) != piece.size:
                    raise OSError(f"{file} ends within {name}")
                changes.apply(at, piece)
                digest.update(piece)
                if os.pwrite(data.fileno(), piece.data, begin + at) != piece.size:
                    raise OSError(f"{file} took a part of {name} only")
        changes.finish()
    except ValueError as error:
        raise UsageError(f"the delta of {name} in {delta_file} is damaged: {error}") from None
    if digest.hexdigest() != header.metadata.get(name):
        raise UsageError(
            f"{name} has {wanted['checksum_format']} {digest.hexdigest()} after the delta of {delta_file}, and had "
            f"{header.metadata.get(name)} at the trainer"
        )
    return changes.found
