"""Weight sync over files: a full HF checkpoint a version in a directory that trainer and engines share.

The source rank writes every bucket to `<--update-weight-disk-dir>/weight_v%06d`, under another name until all of it is
on the disk, while the engines still generate. Then come the user's hook, on every rank, and the hosts' own copies, if
there are any. Only then comes the pause: each engine loads the directory, or the copy, by `/update_weights_from_disk`.
Afterwards the directory is removed, unless versions are kept.

It needs no network between trainer and engines but HTTP, and takes the time of a write and of a read of the weights.
A disk that is full ends the run before any engine is paused; a version that engines could not load is written anew.

With --update-weight-mode delta (`DeltaWeightUpdater`) the first version is a whole one. The source rank keeps a copy
of the bytes that it sent, in host memory, and compares with it where the weights are, on a GPU. Later versions hold,
for each tensor that changed, a compressed delta to it (slime.weights.delta) and a checksum of the result. Every host
with engines has a copy of the weights as files (--update-weight-local-checkpoint-dir). Deltas are applied to it, and
engines load what changed from there (sglang_utils/disk_weights.py). A delta that a host refuses, because it is damaged
or a version is missing there, is followed by a whole version. So is every failure, and every new set of engines.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from slime.backends.megatron_utils.checkpoint.hf_export import HfWriter, UntilFirstError
from slime.backends.megatron_utils.update_weight.base import WeightSyncError, WeightUpdater
from slime.backends.megatron_utils.update_weight.buckets import check_versions
from slime.config.args import Args
from slime.utils import accelerator
from slime.utils.distributed_utils import gathered
from slime.utils.errors import UsageError
from slime.utils.misc import attempt, hook_args, load_function, needed
from slime.weights.delta import COMPRESSION, Part, checksum, encode_part, join, parts_of, raw_of
from slime.weights.transports import FLAG, WeightDir

logger = logging.getLogger(__name__)

MAX_THREADS = 16
HOOK_FLAG = "--custom-update-weight-post-write-path"


class DiskWeightUpdater(WeightUpdater):
    """Writes the weights as files and has the engines load them; the hook gets the engines as they were given.

    Args:
        args: reads also `update_weight_disk_dir`, `update_weight_disk_keep_files`, `output_dir`,
            `custom_update_weight_post_write_path`, `update_weight_local_checkpoint_dir`.
        model: this rank's Megatron model chunks.
    """

    is_over_files = True

    def __init__(self, args: Args, model: list[Any]) -> None:
        super().__init__(args, model)
        root = Path(needed(args.update_weight_disk_dir)).absolute()
        self._dir = WeightDir(root, keeps_files=args.update_weight_disk_keep_files, run=str(args.output_dir))
        path = args.custom_update_weight_post_write_path
        self._hook: Callable[[Any, str, list[Any]], None] | None = load_function(path) if path else None
        local = args.update_weight_local_checkpoint_dir
        self._local_dir = None if local is None else str(Path(local).absolute())
        self._version_id = ""
        self._is_written = False
        self._metrics: dict[str, float] = {}

    def _open_anew(self) -> None:
        """Take the directory."""
        self._by_source(lambda: self._dir.claim(goes_on=self.weight_version > 0), also=(UsageError, OSError))

    def _prepare(self) -> None:
        self._write()
        if self._local_dir is not None and self.is_source:
            self._bring_copies(self._local_dir)

    def _bring_copies(self, local_dir: str) -> WeightSyncError | None:
        """Have every host bring its copy to this version while the engines still generate.

        Returns:
            what is wrong; engines that load bring the copy themselves, and are asked again for it.
        """
        ours = self.fleet.some([i for i, engine in self.fleet.engines.items() if getattr(engine, "is_ours", False)])
        path = str(self._dir.path(self.weight_version))
        start = time.monotonic()
        self._metrics.pop("perf/update_weights_copy_time", None)
        try:
            copying = ours.start("bring_copy", path, local_dir=local_dir, timeout_s=self.deadline_s)
            ours.wait(copying, f"the copy of weights {self.weight_version} to {local_dir}")
        except WeightSyncError as error:
            logger.warning("weight sync %d: no copy before the pause: %s", self.weight_version, error)
            return error
        self._metrics["perf/update_weights_copy_time"] = time.monotonic() - start
        return None

    def _attempt(self) -> WeightSyncError | None:
        if not self._is_written:
            self._write()  # the first attempt failed: everything anew
        self._is_written = False
        if not self.is_source:
            return None
        path, version = self._dir.path(self.weight_version), f"{self.weight_version}.0"
        try:
            how = {"weight_version": version, "local_dir": self._local_dir, "timeout_s": self.deadline_s}
            loading = self.fleet.start("update_weights_from_disk", str(path), **how)
            found = self.fleet.wait(loading, f"the load of weights {self.weight_version} from {path}")
            check_versions(self.fleet, dict(zip(loading, found, strict=True)), version)
        except WeightSyncError as error:
            return error
        return self._compare()

    def _release(self) -> None:
        if self.is_source:
            self._dir.discard(self.weight_version)

    def _more_metrics(self) -> dict[str, float]:
        return self._metrics

    # ---- writing

    def _write(self) -> None:
        """Write this version and call the hook (collective).

        Raises:
            WeightSyncError: on every rank; the version's name does not exist then.
        """
        start = time.monotonic()
        error = self._write_files(self._dir.path(self.weight_version))
        if error := self._from_source(error):
            raise error
        self._call_hook(str(self._dir.path(self.weight_version)))
        self._is_written = True
        self._metrics["perf/update_weights_write_time"] = time.monotonic() - start

    def _write_files(self, path: Path) -> WeightSyncError | None:
        """Every rank goes through all buckets, whatever fails on the way; the source rank writes them."""
        steps = UntilFirstError(WeightSyncError, OSError, SafetensorError)
        writer = steps.do(self._new_writer, path) if self.is_source else None
        for bucket in self._buckets():
            if writer is not None:
                steps.do(writer.add, bucket)
        if writer is not None:
            steps.do(writer.finish)
            self._note(writer)
            if steps.error is not None:
                writer.discard()
        if steps.error is None or isinstance(steps.error, WeightSyncError):
            return steps.error
        message = (
            f"weight sync {self.weight_version} could not be written to {FLAG} {self._dir.root}: {steps.error}; free "
            "some space there, or give another directory"
        )
        return WeightSyncError(message, is_final=True)

    def _note(self, writer: HfWriter) -> None:
        """Remember what there is to say of a version."""
        self._metrics["perf/update_weights_wire_bytes"] = float(writer.num_bytes)

    def _index_metadata(self) -> dict[str, Any]:
        """What the index of a version says of it; one that is written anew, or by trainers that begin again, has the
        number of another one, and an id of its own."""
        return {"version": self.weight_version, "run": self._dir.run_id, "id": self._version_id}

    def _new_writer(self, path: Path) -> HfWriter:
        return HfWriter(path, self.args.hf_checkpoint, **self._of_whole_version())

    def _of_whole_version(self) -> dict[str, Any]:
        """How a version with all weights is written; a shard, which host memory holds, is as large as a bucket."""
        self._version_id = uuid.uuid4().hex
        return {
            "keeps_dtypes": True,
            "shard_bytes": self.args.update_weight_buffer_size,
            "index_metadata": self._index_metadata(),
            "has_manifest": True,
        }

    def _call_hook(self, path: str) -> None:
        """Every rank calls it, and learns whether it failed on one."""
        if self._hook is None:
            return
        _, failure = attempt(self._hook, hook_args(self.args), path, self.engines)
        if failure is not None:  # reported with its rank, and raised on all
            logger.error("%s failed", HOOK_FLAG, exc_info=failure)
        message = f"{type(failure).__name__}: {failure}" if failure else None
        failed = {rank: text for rank, text in enumerate(gathered(message)) if text is not None}
        if failed:
            where = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise WeightSyncError(f"{HOOK_FLAG} failed on {path}: {where}", is_final=True) from failure


# ---- what changed alone


class DeltaWeightUpdater(DiskWeightUpdater):
    """Writes what changed since the last version.

    Args:
        args: reads also `update_weight_delta_encoding`, `update_weight_delta_checksum`.
        model: this rank's Megatron model chunks.
    """

    def __init__(self, args: Args, model: list[Any]) -> None:
        super().__init__(args, model)
        # Of the source rank:
        self._base: int | None = None  # the version that all hosts have and `_held` holds; None: a whole one is due
        self._is_delta = False  # the version that was written last
        self._refused: WeightSyncError | None = None  # why hosts did not take it as a delta
        self._held: dict[str, torch.Tensor] = {}

    def connect(self, engines: Sequence[Any], *, engine_sizes: Sequence[int]) -> None:
        """Connect as `WeightUpdater` does, and send a whole version first: these engines may be on other hosts."""
        self._base = None
        super().connect(engines, engine_sizes=engine_sizes)

    def _prepare(self) -> None:
        self._refused = None
        super()._prepare()
        if self._from_source(self._refused) is not None:  # there is time for a whole one before the pause
            super()._prepare()

    def _bring_copies(self, local_dir: str) -> WeightSyncError | None:
        error = super()._bring_copies(local_dir)
        if error is not None and self._is_delta:
            self._refused = error
            self._tell_of_refusal(error)
        return error

    def _attempt(self) -> WeightSyncError | None:
        error = super()._attempt()
        if self.is_source and error is None:
            self._base = self.weight_version
        elif self.is_source and self._is_delta and error is not None:
            self._tell_of_refusal(error)
        return error

    def _tell_of_refusal(self, error: WeightSyncError) -> None:
        version = self.weight_version
        logger.warning("version %d was refused as a delta; a whole one follows: %s", version, error)

    def _new_writer(self, path: Path) -> HfWriter:
        base, self._base = self._base, None  # it is again when all hosts have it
        self._is_delta = base is not None
        base_id = self._version_id
        if base is None:
            return WholeWriter(self._held, path, self.args.hf_checkpoint, **self._of_whole_version())
        self._version_id = uuid.uuid4().hex
        metadata = {
            **self._index_metadata(),
            "base_version": base,
            "base_id": base_id,
            "delta_encoding": self.args.update_weight_delta_encoding,
            "compression_format": COMPRESSION,
            "checksum_format": self.args.update_weight_delta_checksum,
        }
        size = self.args.update_weight_buffer_size
        return DeltaWriter(self._held, path, None, shard_bytes=size, index_metadata=metadata, has_manifest=True)

    def _note(self, writer: HfWriter) -> None:
        super()._note(writer)
        density = writer.density if isinstance(writer, DeltaWriter) else 1.0
        self._metrics["perf/update_weights_density"] = density
        if isinstance(writer, DeltaWriter):
            done = (self.weight_version, 100 * density, writer.num_bytes)
            logger.info("version %d: %.3f %% of the elements changed, %d bytes", *done)


class WholeWriter(HfWriter):
    """Writes everything, and keeps a copy of the bytes.

    Args:
        held: name -> bytes of the copy.
        where, how: as of `HfWriter`.
    """

    def __init__(self, held: dict[str, torch.Tensor], *where: Any, **how: Any) -> None:
        super().__init__(*where, **how)
        self._held = held
        held.clear()

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write a bucket."""
        bucket = list(tensors)
        raw = [raw_of(tensor) for _, tensor in bucket]
        sizes, is_pinned = [part.numel() for part in raw], any(part.is_cuda for part in raw)
        room = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=is_pinned)  # one: torch pins powers of two
        for (name, _), held, part in zip(bucket, room.split(sizes), raw, strict=True):
            self._held[name] = held.copy_(part)
        super().add(bucket)


class _Pair(NamedTuple):
    """A tensor's bytes: of the last version, which are made those of the new one, and of the new one.

    Attributes:
        old: in host memory. new: where the trainer has it.
    """

    name: str
    old: torch.Tensor
    new: torch.Tensor
    itemsize: int


class DeltaWriter(HfWriter):
    """Writes the tensors that changed, each as its delta; the copy follows.

    Args:
        held: name -> bytes, of the version that deltas begin from; afterwards those of the new one.
        where, how: as of `HfWriter`; the metadata of the index say encoding and checksum, of `slime.weights.delta`.
    """

    def __init__(self, held: dict[str, torch.Tensor], *where: Any, **how: Any) -> None:
        super().__init__(*where, **how)
        self._held = held
        self._encoding = how["index_metadata"]["delta_encoding"]
        self._checksum_kind = how["index_metadata"]["checksum_format"]
        self._changed = self._elements = 0
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="delta")
        self._to_host = torch.cuda.Stream() if accelerator.kind() == "cuda" else None
        self._deltas: list[tuple[str, Future[torch.Tensor | None]]] = []  # of the last bucket, in the making

    @property
    def density(self) -> float:
        """Share of the elements that changed."""
        return self._changed / max(1, self._elements)

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write what changed of a bucket.

        Raises:
            WeightSyncError: a tensor that the last version did not have.
        """
        pairs = [self._pair_of(*named) for named in tensors]
        parts = [
            [self._threads.submit(self._encode, pair, part) for part in parts_of(pair.new.numel(), pair.new.device)]
            for pair in pairs
        ]
        found = [[task.result() for task in of_pair] for of_pair in parts]
        if self._to_host is not None:
            self._to_host.synchronize()  # the copy is that of the new version
        self._elements += sum(pair.new.numel() // pair.itemsize for pair in pairs)
        self._changed += sum(part.changed for of_pair in found for part in of_pair)
        self._write_deltas()
        self._deltas = [
            (pair.name, self._threads.submit(self._finish, pair, of_pair))
            for pair, of_pair in zip(pairs, found, strict=True)
        ]

    def _write_deltas(self) -> None:
        """Write the deltas of the last bucket; threads finish them while the next bucket is compared."""
        for name, task in self._deltas:
            if (delta := task.result()) is not None:
                super().add([(name, delta)])
        self._deltas = []

    def _pair_of(self, name: str, tensor: torch.Tensor) -> _Pair:
        new, old = raw_of(tensor), self._held.get(name)
        if old is None or old.numel() != new.numel():
            what = "not there" if old is None else f"of {old.numel()} bytes"
            raise WeightSyncError(f"{name} has {new.numel()} bytes now and was {what} before", is_final=True)
        return _Pair(name, old, new, tensor.element_size())

    def _encode(self, pair: _Pair, part: slice) -> Part:
        """The delta of a part; the copy holds the new bytes soon."""
        old, new = pair.old[part], pair.new[part]
        try:
            found = encode_part(old, new, part.start, itemsize=pair.itemsize, encoding=self._encoding)
        except ValueError as error:
            raise WeightSyncError(f"--update-weight-delta-encoding: {pair.name}: {error}", is_final=True) from None
        with torch.cuda.stream(self._to_host):  # while the next parts come the other way
            old.copy_(new, non_blocking=True)
        return found

    def _finish(self, pair: _Pair, parts: list[Part]) -> torch.Tensor | None:
        """The delta of a tensor, whose checksum is noted; None where nothing changed."""
        if not any(part.changed for part in parts):
            return None
        self.note(pair.name, checksum(pair.old.numpy(), self._checksum_kind))
        return torch.frombuffer(bytearray(join(parts, self._encoding)), dtype=torch.uint8)

    def finish(self) -> None:
        """As of `HfWriter`."""
        self._write_deltas()
        self._threads.shutdown()
        super().finish()

    def discard(self) -> None:
        """As of `HfWriter`."""
        self._threads.shutdown()
        super().discard()
