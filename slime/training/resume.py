"""What a run that resumes needs besides weights and optimizer, and how copies in memory are put back.

1. In a checkpoint: the weight of an adaptive KL controller (`trainer_state.json`), a reference that
   --ref-update-interval moves (`reference/`, weights alone) and the manifest of the data source's state. A run with
   the same flags that resumes takes up both of the first; one without them takes the flags' values.
2. In another process's memory: the tensors of `Trainer.state_tensors`, as bytes. A checkpoint fits any layout and
   lasts; this fits the same rank of the same layout alone, and nothing has to be gathered for it.

When to save, what is resumed and where copies are kept is decided elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.algorithms.kl import KlController
from slime.checkpoints.manifest import entries_of, write_manifest
from slime.checkpoints.paths import STATE_MANIFEST, manifest_of_state, state_path
from slime.config.args import Args
from slime.training.backend import Backend
from slime.training.collective_writing import holds
from slime.training.passes import REFERENCE
from slime.utils.accelerator.tensor_backper import TensorBackuper

STATE_FILE = "trainer_state.json"
REFERENCE_PART = "reference"


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
