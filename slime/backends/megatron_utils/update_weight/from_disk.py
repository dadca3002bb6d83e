"""Weight sync over files: a full HF checkpoint a version in a directory that trainer and engines share.

The source rank writes every bucket to `<--update-weight-disk-dir>/weight_v%06d`, under another name until all of it is
on the disk, while the engines still generate. Then come the user's hook, on every rank, and the hosts' own copies, if
there are any. Only then comes the pause: each engine loads the directory, or the copy, by `/update_weights_from_disk`.
Afterwards the directory is removed, unless versions are kept.

It needs no network between trainer and engines but HTTP, and takes the time of a write and of a read of the weights.
A disk that is full ends the run before any engine is paused; a version that engines could not load is written anew.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from slime.backends.megatron_utils.checkpoint.hf_export import HfWriter
from slime.backends.megatron_utils.update_weight.base import WeightSyncError, WeightUpdater
from slime.backends.megatron_utils.update_weight.bucket_stream import check_versions
from slime.config.args import Args
from slime.utils.distributed_utils import gathered
from slime.utils.errors import UsageError
from slime.utils.misc import hook_args, load_function, needed
from slime.weights.version_dir import FLAG, WeightDir

logger = logging.getLogger(__name__)

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
        writer: HfWriter | None = None
        error: WeightSyncError | None = None
        if self.is_source:
            writer, error = self._unless_failed(lambda: self._new_writer(path))
        for bucket in self._buckets():
            if writer is not None and error is None:
                _, error = self._unless_failed(lambda bucket=bucket: writer.add(bucket))  # type: ignore[misc]
        if writer is not None and error is None:
            _, error = self._unless_failed(writer.finish)
        if writer is not None:
            self._note(writer)
            if error is not None:
                writer.discard()
        return error

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

    def _unless_failed(self, action: Callable[[], Any]) -> tuple[Any, WeightSyncError | None]:
        """(what it returns, None), or (None, what was wrong with the disk)."""
        try:
            return action(), None
        except WeightSyncError as error:
            return None, error
        except (OSError, SafetensorError) as error:
            message = (
                f"weight sync {self.weight_version} could not be written to {FLAG} {self._dir.root}: {error}; free "
                "some space there, or give another directory"
            )
            return None, WeightSyncError(message, is_final=True)

    def _call_hook(self, path: str) -> None:
        """Every rank calls it, and learns whether it failed on one."""
        if self._hook is None:
            return
        failure, message = None, None
        try:
            self._hook(hook_args(self.args), path, self.engines)
        except Exception as error:  # the user's code: told with its rank, and raised on all
            logger.exception("%s failed", HOOK_FLAG)
            failure, message = error, f"{type(error).__name__}: {error}"
        failed = {rank: text for rank, text in enumerate(gathered(message)) if text is not None}
        if failed:
            where = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise WeightSyncError(f"{HOOK_FLAG} failed on {path}: {where}", is_final=True) from failure
