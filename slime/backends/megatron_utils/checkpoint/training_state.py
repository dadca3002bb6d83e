"""What a run that goes on needs besides weights and optimizer: in an iteration of a checkpoint, or in memory.

1. In a checkpoint: the weight of an adaptive KL controller (`trainer_state.json`) and a reference that
   --ref-update-interval moves (`reference/`, weights alone). A run with the same flags that resumes goes on with both;
   one without them takes the flags' values.
2. In another process's memory: all that the next train step of one rank depends on, as it is held here. Weights, the
   optimizer's fp32 weights and moments, a moved reference: tensors, by names that a rank of the same layout has too.
   Steps, schedule, loss scale, random states, the weight of the KL: plain values. A checkpoint fits any layout and
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
from slime.backends.megatron_utils.checkpoint.iterations import (
    load_weights,
    random_states,
    save_weights,
    set_random_states,
)
from slime.backends.megatron_utils.checkpoint.writing import holds
from slime.backends.megatron_utils.model.setup import TrainState
from slime.backends.megatron_utils.optimizer.optimizer_state import make_moments
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import finish_param_gather
from slime.config.args import Args
from slime.training.passes import REFERENCE
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


# ---- copies in memory

Named = Iterator[tuple[str, torch.Tensor]]


def state_tensors(state: TrainState, weights: TensorBackuper, *, moves_reference: bool) -> Named:
    """Name -> live tensor, in one order.

    Args:
        state: of the rank.
        weights: names the model's, and has the reference's.
        moves_reference: the reference changes while the run goes on (--ref-update-interval).
    """
    for chunk in state.model:
        finish_param_gather(chunk)
    for name, tensor in weights.live():
        yield f"model/{name}", tensor
    make_moments(state.optimizer)  # before the first step, so that there is something to copy or to restore into
    for number, optimizer in enumerate(_optimizers(state.optimizer)):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for place, param in enumerate(params):
            yield f"optimizer/{number}/{place}", param.detach()
            for name, value in optimizer.state.get(param, {}).items():
                if torch.is_tensor(value):
                    yield f"optimizer/{number}/{place}/{name}", value
    if moves_reference:
        for name, tensor in weights.copies(REFERENCE):
            yield f"reference/{name}", tensor


def state_values(state: TrainState, controller: KlController) -> dict[str, Any]:
    """What is no tensor of the model or the optimizer."""
    return {
        "groups": [
            [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
            for optimizer in _optimizers(state.optimizer)
        ],
        "scalers": [scaler.state_dict() for scaler in _scalers(state.optimizer)],
        "schedule": state.scheduler.state_dict(),
        "random": random_states(),
        "kl_coef": controller.coef,
    }


@torch.no_grad()
def restore_tensors(live: Named, pieces: Iterable[Mapping[str, Any]]) -> None:
    """Overwrite live tensors with copies.

    Args:
        live: of `state_tensors`.
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


def restore_values(state: TrainState, controller: KlController, values: Mapping[str, Any]) -> None:
    """Undo `state_values`."""
    for optimizer, groups in zip(_optimizers(state.optimizer), values["groups"], strict=True):
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            group.update(kept)
    for scaler, kept in zip(_scalers(state.optimizer), values["scalers"], strict=True):
        scaler.load_state_dict(kept)
    state.scheduler.num_steps = 0  # Megatron adds the saved position to the present one
    state.scheduler.load_state_dict(values["schedule"])
    set_random_states(values["random"])
    controller.coef = values["kl_coef"]


def bytes_of(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor in host memory, as an array."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _parts(optimizer: Any) -> list[Any]:
    return list(vars(optimizer).get("chained_optimizers", [optimizer]))


def _optimizers(optimizer: Any) -> list[Any]:
    """torch's optimizers below Megatron's; there is none where this rank has no share of some parameters."""
    return [part.optimizer for part in _parts(optimizer) if part.optimizer is not None]


def _scalers(optimizer: Any) -> list[Any]:
    """The loss scales (fp16)."""
    found = [vars(part).get("grad_scaler") for part in _parts(optimizer)]
    return [scaler for scaler in found if scaler is not None]
