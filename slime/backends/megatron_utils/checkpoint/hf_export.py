"""Write a Megatron model as an HF checkpoint directory.

Weights come from the model alone; config and tokenizer files are copied from --hf-checkpoint, and so is what the
trainer does not have, the part of a model that sees images. The directory appears under its name only when it is
complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from slime.checkpoints.paths import MANIFEST_FILE, entries_of, to_disk, write_manifest
from slime.config.args import Args
from slime.conversion.reader import SafetensorsReader, config_dtype
from slime.conversion.writer import SHARD_BYTES, copy_assets, partial_of, put_in_place, shard_names
from slime.training.resume import DiskFull
from slime.utils.distributed_utils import barrier, gathered
from slime.utils.errors import UsageError, is_of_full_disk
from slime.weights.formats import BLOCK_SUFFIX, TENSOR_SUFFIX
from slime.weights.names import INDEX_FILE, is_of_other_part, prediction_copy_of, text_config
from slime.weights.quantization import E4M3

T = TypeVar("T")
_SCALES = (BLOCK_SUFFIX, TENSOR_SUFFIX)  # int4's are called as those of fp8 by tensor


def save_hf(args: Args, model: Any, path: str | Path) -> None:
    """Export the model to `path` as --hf-checkpoint is stored (dtype, fp8, int4); all ranks call it, rank 0 writes.

    `model` is as in `iter_hf_buckets`.

    Raises:
        UsageError: when `path` is --hf-checkpoint itself.
        DiskFull: it does not fit; nothing of it is left, and an older one of the same name stays.
    """
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator import iter_hf_buckets

    check_output(path, args.hf_checkpoint)
    copies = _copies_in_predictions(args) if args.mtp_num_layers else {}
    steps, written = UntilFirstError(OSError, SafetensorError), set[str]()
    writer = steps.do(HfWriter, path, args.hf_checkpoint) if dist.get_rank() == 0 else None
    for bucket in iter_hf_buckets(args, model, buffer_size=args.update_weight_buffer_size):
        if writer is not None:
            steps.do(writer.add, bucket)
            written |= {name for name, _ in bucket}
            steps.do(writer.add, [(copy, tensor) for name, tensor in bucket for copy in copies.get(name, ())])
    if writer is not None:
        steps.do(writer.add, _of_other_parts(args.hf_checkpoint, written))
        steps.do(writer.finish)
        if steps.error is not None:
            writer.discard()
    if steps.error is not None and not is_of_full_disk(steps.error):
        raise steps.error
    barrier(f"the HF export {path}")
    if problem := gathered(str(steps.error) if steps.error is not None else None)[0]:
        raise DiskFull(f"{Path(path).parent} became full: {problem[:200]}")


class UntilFirstError:
    """Run the steps of the rank that writes until one fails; the other ranks gather to the last tensor all the same.

    Args:
        kinds: of errors that are kept; others pass.

    Attributes:
        error: the first one.
    """

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds
        self.error: Exception | None = None

    def do(self, action: Callable[..., T], *values: Any) -> T | None:
        """Return what the action returns; None where it or one before it has failed."""
        if self.error is None:
            try:
                return action(*values)
            except self._kinds as error:
                self.error = error
        return None


def _copies_in_predictions(args: Args) -> dict[str, list[str]]:
    """Names under which prediction layers of --hf-checkpoint hold copies of the embedding and the output layer."""
    copies: dict[str, list[str]] = {}
    for name in SafetensorsReader(args.hf_checkpoint).names():
        if original := prediction_copy_of(name):
            copies.setdefault(original, []).append(name)
    return copies


def _of_other_parts(hf_checkpoint: str, written: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what the trainer does not have and a model that sees images needs, from --hf-checkpoint."""
    reader = SafetensorsReader(hf_checkpoint)
    return ((name, reader.get(name)) for name in reader.names() if is_of_other_part(name) and name not in written)


def check_output(path: str | Path, hf_checkpoint: str | Path) -> None:
    """Raise UsageError when an export to `path` would overwrite the checkpoint that its config is copied from."""
    if Path(path).resolve() == Path(hf_checkpoint).resolve():
        raise UsageError(f"the HF export {path} would overwrite --hf-checkpoint; choose another directory.")


class HfWriter:
    """Writes safetensors shards with an index beside copied assets, under a temporary name until `finish`.

    Args:
        path: the directory to make; an existing one is replaced at the end.
        assets_from: an HF directory whose files other than weights are copied, and whose config says the dtype to
            write; with None there are only weights, in the dtype that they come in.
        shard_bytes: where a new shard starts.
        keeps_dtypes: write tensors in the dtype that they come in, not in the config's.
        index_metadata: there is an index even of one shard, and it says this, too.
        has_manifest: say in a `MANIFEST_FILE` what all files are, for readers that must not load a wrong bit.
    """

    def __init__(
        self,
        path: str | Path,
        assets_from: str | Path | None,
        *,
        shard_bytes: int = SHARD_BYTES,
        keeps_dtypes: bool = False,
        index_metadata: Mapping[str, Any] | None = None,
        has_manifest: bool = False,
    ) -> None:
        self._path = Path(path)
        self._partial = partial_of(self._path)
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self._dtype: torch.dtype | None = None
        if assets_from is not None:
            copy_assets(assets_from, self._partial)
            if not keeps_dtypes:
                config_of = json.loads((Path(assets_from) / "config.json").read_text())
                self._dtype = config_dtype(text_config(config_of))
        self._shard_bytes = shard_bytes
        self._index_metadata = index_metadata
        self._has_manifest = has_manifest
        self._shard: dict[str, torch.Tensor] = {}
        self._size_of_shard = 0
        self._shards: list[list[str]] = []
        self._notes: dict[str, str] = {}
        self._total_bytes = 0

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take copies of (name, tensor) pairs; quantised weights and their scales keep their dtypes."""
        for name, tensor in tensors:
            is_quantized = not tensor.is_floating_point() or tensor.dtype == E4M3 or name.endswith(_SCALES)
            dtype = tensor.dtype if is_quantized else self._dtype or tensor.dtype
            stored = tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
            if self._shard and self._size_of_shard + stored.nbytes > self._shard_bytes:
                self._flush()
            self._shard[name] = stored
            self._size_of_shard += stored.nbytes

    def note(self, name: str, text: str) -> None:
        """Write something about a tensor, which comes next, into the header of its file."""
        self._notes[name] = text

    def finish(self) -> None:
        """Write what is left and the index, see that all is on the disk, then give the directory its name."""
        self._flush()
        self._name_shards()
        files = [path for path in self._partial.rglob("*") if path.is_file()]
        if self._has_manifest:
            write_manifest(self._partial / MANIFEST_FILE, entries_of(self._partial, files))  # forces them to the disk
            files = []
        for path in (*files, *(path for path in self._partial.rglob("*") if path.is_dir()), self._partial):
            to_disk(path)
        put_in_place(self._partial, self._path, replaces=True)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors written so far."""
        return self._total_bytes

    def discard(self) -> None:
        """Remove what was written; there is no `finish` then."""
        self._shard = {}
        shutil.rmtree(self._partial, ignore_errors=True)

    def _flush(self) -> None:
        if not self._shard:
            return
        notes = {name: self._notes[name] for name in self._shard if name in self._notes}
        path = self._partial / f"shard-{len(self._shards)}"
        path.touch()
        mode = path.stat().st_mode
        save_file(self._shard, path, metadata={"format": "pt", **notes})
        path.chmod(mode)  # safetensors makes files that nobody else can read, whatever the umask is
        self._shards.append(list(self._shard))
        self._total_bytes += self._size_of_shard
        self._shard, self._size_of_shard = {}, 0

    def _name_shards(self) -> None:
        """Shards are called 1 of N, and N is known only now; one shard needs no index."""
        weight_map: dict[str, str] = {}
        for i, (file, names) in enumerate(zip(shard_names(len(self._shards)), self._shards, strict=True)):
            (self._partial / f"shard-{i}").rename(self._partial / file)
            weight_map |= dict.fromkeys(names, file)
        if len(self._shards) > 1 or self._index_metadata is not None:
            metadata = {"total_size": self._total_bytes, **(self._index_metadata or {})}
            index = {"metadata": metadata, "weight_map": weight_map}
            (self._partial / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
