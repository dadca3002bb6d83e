"""What a run that resumes needs besides weights and optimizer, how ranks write it together, and what is deleted.

1. In a checkpoint: the weight of an adaptive KL controller (`trainer_state.json`), a reference that
   --ref-update-interval moves (`reference/`, weights alone) and the manifest of the data source's state. A run with
   the same flags that resumes takes up both of the first; one without them takes the flags' values.
2. In another process's memory: the tensors of `Trainer.state_tensors`, as bytes. A checkpoint fits any layout and
   lasts; this fits the same rank of the same layout alone, and nothing has to be gathered for it.

Deletion (--keep-checkpoints, --save-retain-interval) touches only what our layout names and holds: `iter_*`
directories with our model_shape.json, the data source's states of iterations that are gone, and HF directories at the
places that a --save-hf template names. Iterations after the one just written belong to an abandoned branch of an
earlier run, or are not yet overwritten: they are left alone.

A checkpoint that does not fit on its disk is given up, on every rank, and what was written of it is removed. A run can
go on without it: the one before is still there. Whether it fits is asked before anything is written; what shows only
then (a quota, another writer) is recognised by the error. Often one rank alone has it, for most small files are rank
0's: it must not leave the others waiting, so all ranks learn of it at the end of a block (`together`).
"""

from __future__ import annotations

import functools
import glob
import json
import logging
import re
import shutil
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from slime.algorithms.losses import KlController
from slime.checkpoints.paths import (
    MODEL_SHAPE_FILE,
    STATE_MANIFEST,
    entries_of,
    manifest_of_state,
    state_path,
    write_manifest,
)
from slime.config.args import Args
from slime.config.roles import critic_save_dir
from slime.training.backend import Backend
from slime.training.micro_batches import REFERENCE
from slime.utils.accelerator.tensor_backper import TensorBackuper
from slime.utils.distributed_utils import barrier, gathered
from slime.utils.errors import line_of_full_disk, said

logger = logging.getLogger(__name__)

MARGIN = 64 * 2**20
"""Bytes for the small files of a checkpoint."""


class DiskFull(RuntimeError):
    """A checkpoint was not written, for want of room; the message says where and how much."""


class _Blocks:
    """The `together` blocks that this process is in, the innermost last: what failed inside and was not raised yet."""

    open: list[list[BaseException]] = []


@contextmanager
def together(what: str) -> Iterator[None]:
    """What fails on one rank inside the block is raised on every rank, at its end; every rank enters it.

    A rank leaves the block at its error. So where the ranks wait for each other inside it, what can fail on one of
    them alone before that has to be held (`holds`), or be in a block of its own.

    Args:
        what: as of `barrier`.

    Raises:
        RuntimeError: it failed on another rank. Where it failed the error itself is raised.
        WaitTimeout: a rank does not come to the end of the block.
    """
    failed: list[BaseException] = []
    _Blocks.open.append(failed)
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        failed.append(error)
    finally:
        _Blocks.open.pop()
    barrier(what)
    of_ranks = gathered(f"{type(failed[0]).__name__}: {said(failed[0])}" if failed else None)
    if failed:
        raise failed[0]
    for rank, problem in enumerate(of_ranks):
        if problem is not None:
            raise RuntimeError(f"rank {rank}: {problem}")


def holds(write: Callable[..., Any]) -> Callable[..., None]:
    """A write for which other ranks wait right after it: what it fails with is raised at the end of the block that it
    is called in, and outside of one at once."""

    @functools.wraps(write)
    def held(*args: Any, **kwargs: Any) -> None:
        try:
            write(*args, **kwargs)
        except Exception as error:
            if not _Blocks.open:
                raise
            _Blocks.open[-1].append(error)

    return held


@contextmanager
def gives_way_to_a_full_disk(directory: Path, *, needed: int | None) -> Iterator[None]:
    """Write a checkpoint to `directory` inside the block, which is one as of `together`; every rank enters it.

    Args:
        directory: exists where `needed` is given; removed where the block gives up.
        needed: bytes that this rank will write; None where they are written, or being written, already.

    Raises:
        DiskFull: it does not fit, or did not on some rank. Other errors pass.
    """
    wanted, free = 0, 1
    if needed is not None:
        wanted, free = sum(gathered(needed)) + MARGIN, gathered(shutil.disk_usage(directory).free)[0]
    if wanted > free:
        _remove(directory)
        raise DiskFull(f"{directory.parent} has {free / 1e9:.2f} GB free, and it takes {wanted / 1e9:.2f} GB")
    try:
        with together(f"the checkpoint {directory}"):
            yield
    except (Exception, CheckpointException) as error:
        # Of all ranks: torch says on rank 0 alone what another one failed with.
        problem = next(filter(None, gathered(line_of_full_disk(error))), None)
        if problem is None:
            raise
        _remove(directory)
        raise DiskFull(f"{directory.parent} became full: {problem[-200:]}") from error


def _remove(directory: Path) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
    gathered(None)  # gone on every rank


STATE_FILE = "trainer_state.json"
REFERENCE_PART = "reference"
_ITERATION = re.compile(r"iter_(\d{7,})")
_DATA_STATE = re.compile(r"global_dataset_state_dict_(\d+)\.(?:pt|manifest\.json)")
_BEING_DELETED = ".deleted"


def write_resumed_state(
    args: Args, directory: Path, *, backend: Backend, weights: TensorBackuper, controller: KlController
) -> None:
    """Add to an unfinished iteration what this run changes; every rank calls it.

    Args:
        args: `ref_update_interval`, `kl_ctrl`.
        directory: the iteration's.
        backend: its model holds the policy's weights, also afterwards.
        weights: has the reference's.
        controller: of the KL in the rewards.
    """
    if args.kl_ctrl == "adaptive" and dist.get_rank() == 0:
        holds((directory / STATE_FILE).write_text)(json.dumps({"kl_coef": controller.coef}) + "\n")
    if args.ref_update_interval:
        with weights.swapped(REFERENCE):
            backend.save_weights(directory / REFERENCE_PART)


def note_state_of_data_source(directory: Path, root: str, rollout_id: int) -> None:
    """Write into an unfinished iteration what the data source's state after the rollout is; rank 0 calls it.

    A data source of the user's own writes what it likes; without a manifest of it nothing is noted.

    Args:
        directory: the iteration's, in `root`.
        root: of the actor's checkpoints.
        rollout_id: its state is written.
    """
    state = state_path(root, rollout_id)
    if manifest_of_state(state).is_file():
        holds(_note)(directory, [state, manifest_of_state(state)])


def _note(directory: Path, files: Sequence[Path]) -> None:
    entries = entries_of(directory.parent, files)
    write_manifest(directory / STATE_MANIFEST, {f"../{name}": entry for name, entry in entries.items()})


def restore_controller(args: Args, directory: Path | None, controller: KlController) -> None:
    """Give an adaptive controller the weight that it had, where the iteration at `directory` has one."""
    if args.kl_ctrl == "adaptive" and directory is not None and (directory / STATE_FILE).is_file():
        controller.coef = json.loads((directory / STATE_FILE).read_text())["kl_coef"]


def load_moved_reference(args: Args, directory: Path | None, backend: Backend) -> bool:
    """Put the reference of the iteration at `directory` into the model; False where it has none."""
    if not args.ref_update_interval or directory is None or not (directory / REFERENCE_PART).is_dir():
        return False
    backend.load_weights(directory / REFERENCE_PART)
    return True


# ---- copies in memory


@torch.no_grad()
def restore_tensors(live: Iterator[tuple[str, torch.Tensor]], pieces: Iterable[Mapping[str, Any]]) -> None:
    """Overwrite live tensors with copies.

    Args:
        live: of `Trainer.state_tensors`.
        pieces: name -> array of the bytes of a tensor.

    Raises:
        RuntimeError: they are not those of a rank of this layout.
    """
    missing = dict(live)
    for piece in pieces:
        for name, array in piece.items():
            tensor = missing.pop(name, None)
            if tensor is None or tensor.nbytes != array.nbytes:
                raise RuntimeError(f"the copy's {name} ({array.nbytes} bytes) is not one of this rank's tensors")
            copy = torch.from_numpy(array.copy()).view(tensor.dtype).reshape(tensor.shape)
            tensor.copy_(copy)
    if missing:
        raise RuntimeError(f"the copy lacks {len(missing)} of this rank's tensors, {next(iter(missing))} among them")


# ---- old checkpoints


def prune_after_save(args: Args, rollout_id: int) -> None:
    """Delete what neither --keep-checkpoints nor --save-retain-interval keeps, after a rollout's was written; never
    what a flag says is loaded.

    Args:
        args: where the run writes and what it loads.
        rollout_id: the one just written.
    """
    loads = (args.hf_checkpoint, args.load, args.ref_load, args.opd_teacher_load)
    in_use = [Path(path) for path in loads if path]
    keep, retain = args.keep_checkpoints or 1, args.save_retain_interval
    if args.save:
        steps = (
            (args.load, args.ckpt_step),
            (args.ref_load, args.ref_ckpt_step),
            (args.opd_teacher_load, args.opd_teacher_ckpt_step),
        )
        ids = [step for path, step in steps if path and Path(path).resolve() == Path(args.save).resolve()]
        roots = [args.save]
        if args.use_critic and (of_critic := critic_save_dir(args)):
            roots.append(of_critic)  # written before the actor's, and deleted after: both always have one iteration
        for root in roots:
            prune_checkpoints(
                root,
                rollout_id,
                keep=keep,
                retain=retain,
                protected=in_use,
                protected_ids=[step for step in ids if step is not None],
            )
    if args.save_hf:
        prune_exports(args.save_hf, rollout_id, keep=keep, retain=retain, protected=in_use)


def prune_checkpoints(
    root: str | Path,
    newest: int,
    *,
    keep: int,
    retain: int | None = None,
    protected: Collection[Path] = (),
    protected_ids: Collection[int] = (),
) -> list[int]:
    """Delete all but the newest `keep` complete iterations up to `newest`, and the data states of those that are gone.

    Args:
        root: checkpoint root.
        newest: the iteration that was just completed; always kept.
        keep: how many to keep, itself included.
        retain: keep also every so many rollouts' (--save-retain-interval).
        protected: paths that are in use; an iteration that holds one is kept.
        protected_ids: iterations that are in use.

    Returns:
        the iterations that were deleted.
    """
    root = Path(root)
    for leftover in root.glob(f".iter_*{_BEING_DELETED}"):  # of a run that ended while it deleted
        shutil.rmtree(leftover, ignore_errors=True)
    ours = {
        int(found[1]): path
        for path in root.glob("iter_*")
        if (found := _ITERATION.fullmatch(path.name)) and (path / MODEL_SHAPE_FILE).is_file()
    }
    protected_ids = {*protected_ids, *_retained(ours, retain)}
    deleted = _delete_old(ours, newest, keep=keep, protected=protected, protected_ids=protected_ids)
    there = {int(found[1]) for path in root.glob("iter_*") if (found := _ITERATION.fullmatch(path.name))}
    for path in (root / "rollout").glob("global_dataset_state_dict_*"):
        found = _DATA_STATE.fullmatch(path.name)
        if found and int(found[1]) < newest and int(found[1]) not in there:
            path.unlink(missing_ok=True)
    return deleted


def prune_exports(
    template: str, newest: int, *, keep: int, retain: int | None = None, protected: Collection[Path] = ()
) -> list[int]:
    """Delete all but the newest `keep` HF exports of a --save-hf template up to the one of rollout `newest`.

    Args:
        template: a path with {rollout_id}; without it there is one export, and nothing is deleted.
        newest: the rollout whose export was just completed; always kept.
        keep: how many to keep, itself included.
        retain: keep also every so many rollouts' (--save-retain-interval).
        protected: paths that are in use.

    Returns:
        the rollouts whose exports were deleted.
    """
    exports = {rollout_id: path for rollout_id, path in _places(template) if _is_export(path)}
    return _delete_old(exports, newest, keep=keep, protected=protected, protected_ids=_retained(exports, retain))


def _retained(ids: Iterable[int], interval: int | None) -> list[int]:
    """Those after whose rollout a multiple of `interval` is done: with 5, of rollouts 4, 9, 14."""
    return [] if interval is None else [one for one in ids if (one + 1) % interval == 0]


def _delete_old(
    places: dict[int, Path], newest: int, *, keep: int, protected: Collection[Path], protected_ids: Collection[int]
) -> list[int]:
    in_order = sorted(i for i in places if i <= newest)
    in_use = {path.resolve() for path in protected}
    deleted = []
    for i in in_order[:-keep]:
        path = places[i].resolve()
        if i == newest or i in protected_ids or any(used.is_relative_to(path) for used in in_use):
            continue
        if _delete(places[i]):
            deleted.append(i)
    return deleted


def _delete(directory: Path) -> bool:
    """Take the name away first: what is half deleted must not look like a checkpoint."""
    doomed = directory.with_name(f".{directory.name}{_BEING_DELETED}")
    try:
        directory.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        logger.warning("--keep-checkpoints: %s cannot be deleted: %s", directory, error)
        return False
    return True


def _places(template: str) -> Iterable[tuple[int, Path]]:
    """(rollout id, path) of everything on disk whose path is the template, filled in with a number."""
    parts = [(text, name is not None) for text, name, _, _ in string.Formatter().parse(template)]
    if not any(has_id for _, has_id in parts):
        return
    pattern = re.compile("".join(re.escape(text) + r"(\d+)" * has_id for text, has_id in parts))
    for place in glob.glob("".join(glob.escape(text) + "*" * has_id for text, has_id in parts)):
        found = pattern.fullmatch(place)
        if found and template.format(rollout_id=int(found[1])) == place:
            yield int(found[1]), Path(place)


def _is_export(directory: Path) -> bool:
    return (directory / "config.json").is_file() and any(directory.glob("model*.safetensors"))
