"""Weight sync over files that hold only what changed: --update-weight-mode delta.

The first version is a whole one. The source rank keeps a copy of the bytes that it sent, in host memory. Later
versions hold, for each tensor that changed, a compressed delta to that copy (slime.weights.delta) and a checksum
of the result. Every host with engines has a copy of the weights as files (--update-weight-local-checkpoint-dir), to
which deltas are applied, and from which engines load the tensors that changed (sglang_utils/disk_weights.py).

A delta that a host refuses, because it is damaged or a version is missing there, is followed by a whole version. So is
every failure, and every new set of engines.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from slime.backends.megatron_utils.checkpoint.hf_export import HfWriter
from slime.backends.megatron_utils.update_weight.base import WeightSyncError
from slime.backends.megatron_utils.update_weight.from_disk import DiskWeightUpdater
from slime.config.args import Args
from slime.weights.delta import COMPRESSION, Bytes, checksum, encode_part, parts_of

logger = logging.getLogger(__name__)

MAX_THREADS = 16


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
        self._held: dict[str, Bytes] = {}

    def connect(self, engines: Sequence[Any], *, engine_sizes: Sequence[int]) -> None:
        """As of `WeightUpdater`; these engines may be on other hosts, so that they get a whole version first."""
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

    def __init__(self, held: dict[str, Bytes], *where: Any, **how: Any) -> None:
        super().__init__(*where, **how)
        self._held = held
        held.clear()

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write a bucket."""
        bucket = list(tensors)
        self._held |= {name: np.array(bytes_of(tensor)) for name, tensor in bucket}
        super().add(bucket)


class _Pair(NamedTuple):
    """A tensor's bytes: of the last version, which are made those of the new one, and of the new one."""

    name: str
    old: Bytes
    new: Bytes
    itemsize: int


class DeltaWriter(HfWriter):
    """Writes the tensors that changed, each as its delta; the copy follows.

    Args:
        held: name -> bytes, of the version that deltas begin from; afterwards those of the new one.
        where, how: as of `HfWriter`; the metadata of the index say encoding and checksum, of `slime.weights.delta`.
    """

    def __init__(self, held: dict[str, Bytes], *where: Any, **how: Any) -> None:
        super().__init__(*where, **how)
        self._held = held
        self._encoding = how["index_metadata"]["delta_encoding"]
        self._checksum_kind = how["index_metadata"]["checksum_format"]
        self._changed = self._elements = 0
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="delta")

    @property
    def density(self) -> float:
        """Share of the elements that changed."""
        return self._changed / max(1, self._elements)

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write what changed of a bucket.

        Raises:
            WeightSyncError: a tensor that the last version did not have.
        """
        pairs = list(self._threads.map(self._pair_of, tensors))
        work = [(pair, part) for pair in pairs for part in parts_of(pair.new.size, self._encoding)]
        encoded = self._threads.map(lambda item: self._encode(*item), work)
        for pair, of_pair in zip(pairs, _split(encoded, pairs, self._encoding), strict=True):
            changed = sum(count for _, count in of_pair)
            self._elements += pair.new.size // pair.itemsize
            self._changed += changed
            if changed:
                delta = np.frombuffer(bytearray().join(part for part, _ in of_pair), np.uint8)
                self.note(pair.name, checksum(pair.new, self._checksum_kind))
                super().add([(pair.name, torch.from_numpy(delta))])

    def _pair_of(self, named: tuple[str, torch.Tensor]) -> _Pair:
        name, tensor = named
        new, old = bytes_of(tensor), self._held.get(name)
        if old is None or old.size != new.size:
            what = "not there" if old is None else f"of {old.size} bytes"
            raise WeightSyncError(f"{name} has {new.size} bytes now and was {what} before", is_final=True)
        return _Pair(name, old, new, tensor.element_size())

    def _encode(self, pair: _Pair, part: slice) -> tuple[bytes, int]:
        """The delta of a part, and how many elements changed; the copy holds the new bytes then."""
        old, new = pair.old[part], pair.new[part]
        try:
            delta, changed = encode_part(old, new, itemsize=pair.itemsize, encoding=self._encoding)
        except ValueError as error:
            raise WeightSyncError(f"--update-weight-delta-encoding: {pair.name}: {error}", is_final=True) from None
        np.copyto(old, new)
        return delta, changed

    def finish(self) -> None:
        """As of `HfWriter`."""
        self._threads.shutdown()
        super().finish()

    def discard(self) -> None:
        """As of `HfWriter`."""
        self._threads.shutdown()
        super().discard()


def _split(
    encoded: Iterator[tuple[bytes, int]], pairs: Sequence[_Pair], encoding: str
) -> Iterator[list[tuple[bytes, int]]]:
    """What belongs to each pair."""
    for pair in pairs:
        yield list(islice(encoded, len(parts_of(pair.new.size, encoding))))


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The raw bytes of a tensor in host memory; of one that is there already, no copy."""
    raw: Bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw
