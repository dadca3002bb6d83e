"""What the next train step of one rank depends on, as it is held here: for a copy in another process's memory.

Weights, the optimizer's fp32 weights and moments, a moved reference: tensors, by names that a rank of the same layout
has too. Steps, schedule, loss scale, random states, the weight of the KL: plain values. A checkpoint (checkpoint.py)
fits any layout and lasts; this fits the same rank of the same layout alone, and nothing has to be gathered for it. It
does not know where copies are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from slime.algorithms.kl import KlController
from slime.backends.megatron_utils.checkpoint.iterations import random_states, set_random_states
from slime.backends.megatron_utils.model.setup import TrainState
from slime.backends.megatron_utils.optimizer.optimizer_state import make_moments
from slime.backends.megatron_utils.passes.forward_passes import REFERENCE
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import finish_param_gather
from slime.utils.tensor_backper import TensorBackuper

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
