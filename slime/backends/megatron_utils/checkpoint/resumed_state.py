"""What the next rollout's training depends on besides weights and optimizer, inside an iteration of a checkpoint.

Two things change while a run goes on: the weight of an adaptive KL controller (`trainer_state.json`) and a reference
that --ref-update-interval moves (`reference/`, weights alone). A run with the same flags that resumes goes on with
both; one without them takes the flags' values. It decides neither when to save nor what is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from slime.algorithms.kl import KlController
from slime.backends.megatron_utils.checkpoint.iterations import load_weights, save_weights
from slime.backends.megatron_utils.checkpoint.out_of_space import holds
from slime.backends.megatron_utils.passes.forward_passes import REFERENCE
from slime.config.args import Args
from slime.utils.checkpoint_paths import STATE_MANIFEST, manifest_of_state, state_path
from slime.utils.manifest import entries_of, write_manifest
from slime.utils.tensor_backper import TensorBackuper

STATE_FILE = "trainer_state.json"
REFERENCE_PART = "reference"


def write_resumed_state(
    args: Args,
    directory: Path,
    *,
    model: Sequence[torch.nn.Module],
    weights: TensorBackuper,
    controller: KlController,
) -> None:
    """Add to an unfinished iteration what this run changes; every rank calls it.

    Args:
        args: `ref_update_interval`, `kl_ctrl`.
        directory: the iteration's.
        model: holds the policy's weights, also afterwards.
        weights: has the reference's.
        controller: of the KL in the rewards.
    """
    if args.kl_ctrl == "adaptive" and dist.get_rank() == 0:
        holds((directory / STATE_FILE).write_text)(json.dumps({"kl_coef": controller.coef}) + "\n")
    if args.ref_update_interval:
        with weights.swapped(REFERENCE):
            save_weights(directory / REFERENCE_PART, model)


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


def load_moved_reference(args: Args, directory: Path | None, model: Sequence[torch.nn.Module]) -> bool:
    """Put the reference of the iteration at `directory` into the model; False where it has none."""
    if not args.ref_update_interval or directory is None or not (directory / REFERENCE_PART).is_dir():
        return False
    load_weights(directory / REFERENCE_PART, model)
    return True
