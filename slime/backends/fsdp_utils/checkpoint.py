"""Checkpoints of a sharded model: torch.distributed.checkpoint of the shards, and a small JSON file of all else.

Names of tensors do not depend on the number of ranks, so that any number can load what another has saved. The
directory has a name, a manifest and a tracker as those of Megatron have (`iterations`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from slime.backends.fsdp_utils.lora import adapters_of, base_checksum
from slime.backends.fsdp_utils.model import Policy
from slime.backends.fsdp_utils.optimizer import OPTIMIZERS, ShardedAdamW, ShardedSgd
from slime.backends.fsdp_utils.weights import HEAD, fixed_tensors, named_parameters, trained_parameters
from slime.backends.megatron_utils.checkpoint.iterations import UnfinishedCheckpoint, new_directory
from slime.backends.megatron_utils.megatron_patch.checkpoints import loading
from slime.checkpoints.paths import MODEL_SHAPE_FILE, check_names, resolve_checkpoint_dir
from slime.training.adapters import compare_base, refuse_adapters_alone
from slime.training.backend import CheckpointSource
from slime.training.resume import gives_way_to_a_full_disk, together
from slime.utils.distributed_utils import gathered, get_gloo_group
from slime.utils.errors import UsageError

STATE_FILE = "fsdp_state.json"


@dataclass
class TrainState:
    """What a train step changes."""

    policy: Policy
    optimizer: ShardedAdamW | ShardedSgd
    scheduler: Any


# ---- all tensors, and all else, by name


def weights(policy: Policy, *, of_base: bool = False) -> dict[str, torch.Tensor]:
    """Name -> live shard of each parameter, and each fixed tensor; with adapters those alone that are trained.

    Args:
        policy: whose.
        of_base: what is under its adapters, instead.
    """
    named = [*named_parameters(policy), *fixed_tensors(policy)]
    if adapters_of(policy):
        named = [(name, tensor) for name, tensor in named if tensor.requires_grad != of_base]
    return {f"model.{name}": tensor.detach() for name, tensor in named}


def moments(state: TrainState) -> dict[str, torch.Tensor]:
    """Name -> live shard of each moment of Adam."""
    state.optimizer.make_moments()
    return {
        f"optimizer.{name}.{moment}": tensor
        for name, parameter in trained_parameters(state.policy)
        for moment, tensor in state.optimizer.moments(parameter).items()
    }


def random_states() -> dict[str, Any]:
    """This process's random states, of all that a training draws from, as plain values."""
    kind, keys, *rest = np.random.get_state()
    version, numbers, gauss = random.getstate()
    on_device = torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else None
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "device": on_device,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Undo `random_states`."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if states["device"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(states["device"], dtype=torch.uint8))


# ---- files


def save_weights(directory: Path, policy: Policy) -> None:
    """Write the weights alone to a new directory (collective)."""
    with together(f"the preparation of {directory}"):
        if dist.get_rank() == 0:
            directory.mkdir(parents=True)
    dcp.save(weights(policy), checkpoint_id=str(directory), process_group=get_gloo_group())


def load_tensors(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Overwrite tensors with what a checkpoint has under their names (collective)."""
    with loading(directory), torch.no_grad():
        dcp.load(tensors, checkpoint_id=str(directory), process_group=get_gloo_group())


def begin_checkpoint(
    root: str,
    iteration: int,
    state: TrainState,
    *,
    contents: Collection[str],
    model_shape: dict[str, Any],
    write_more: Callable[[Path], None],
) -> UnfinishedCheckpoint:
    """Write a checkpoint but for its name (collective); arguments are those of Megatron's.

    Raises:
        DiskFull: it does not fit; nothing of it is left.
    """
    partial = new_directory(root, iteration)
    tensors, more = weights(state.policy), {"iteration": iteration, "world_size": dist.get_world_size()}
    if "optimizer" in contents:
        tensors |= moments(state)
        more |= {"optimizer": type(state.optimizer).__name__}
        more |= {"steps": state.optimizer.num_steps, "schedule": state.scheduler.state_dict()}
    if adapters_of(state.policy):
        more["base_checksum"] = base_checksum(state.policy)
    if "rng" in contents:
        more["random"] = gathered(random_states())
    num_bytes = sum(tensor.to_local().nbytes if hasattr(tensor, "to_local") else 0 for tensor in tensors.values())
    with gives_way_to_a_full_disk(partial, needed=num_bytes):
        dcp.save(tensors, checkpoint_id=str(partial), process_group=get_gloo_group())
        write_more(partial)
        if dist.get_rank() == 0:
            (partial / STATE_FILE).write_text(json.dumps(more))
            (partial / MODEL_SHAPE_FILE).write_text(json.dumps(model_shape, indent=2) + "\n")
    return UnfinishedCheckpoint(Path(root), iteration, partial, None)


def load_checkpoint(source: CheckpointSource, state: TrainState) -> Iterator[str]:
    """Load what `source` says (collective); yields a sentence about each thing that starts fresh.

    Raises:
        UsageError: there is no such checkpoint, or it is Megatron's.
    """
    directory, _ = resolve_checkpoint_dir(source.path, source.step)
    if not (directory / STATE_FILE).is_file():
        raise UsageError(
            f"{directory} is Megatron's, which --train-backend fsdp cannot read; convert it with "
            "tools/convert_torch_dist_to_hf.py and load the HF directory, or use --train-backend megatron."
        )
    check_names(directory)
    more, there = json.loads((directory / STATE_FILE).read_text()), names_in(directory)
    of_adapters = "base_checksum" in more
    refuse_adapters_alone(directory, has_adapters=bool(adapters_of(state.policy)))
    tensors = weights(state.policy, of_base=not of_adapters)
    fresh_head = [name for name in tensors if name.startswith(f"model.{HEAD}") and name not in there]
    tensors = {name: tensor for name, tensor in tensors.items() if name not in fresh_head}
    of_base = bool(adapters_of(state.policy)) and not of_adapters
    with_optimizer = source.load_optimizer and "steps" in more and not of_base
    if with_optimizer:
        _refuse_other(state, more.get("optimizer", ShardedAdamW.__name__), directory)
        tensors |= moments(state)
    load_tensors(directory, tensors)
    if of_adapters:
        compare_base(base_checksum(state.policy), more["base_checksum"], directory)
    if with_optimizer:
        state.optimizer.num_steps = more["steps"]
        state.scheduler.num_steps = 0  # Megatron's class adds the saved position to the present one
        state.scheduler.load_state_dict(more["schedule"])
    elif source.load_optimizer:
        yield f"{directory} holds no optimizer state: its moments and the learning-rate schedule start anew"
    if not source.load_rng:
        return
    if "random" not in more:
        yield f"{directory} holds no random states: they start from --seed"
    elif more["world_size"] != dist.get_world_size():
        yield f"random states are not restored from {directory}: it was saved by {more['world_size']} ranks"
    else:
        set_random_states(more["random"][dist.get_rank()])


def _refuse_other(state: TrainState, saved: str, directory: Path) -> None:
    if saved != type(state.optimizer).__name__:
        names = {kind.__name__: name for name, kind in OPTIMIZERS.items()}
        raise UsageError(
            f"{directory} was saved with --optimizer {names.get(saved, saved)}, whose state is of no use to "
            f"--optimizer {names[type(state.optimizer).__name__]}: give the former, or --no-load-optim to begin anew."
        )


def names_in(directory: Path) -> Collection[str]:
    """Names of the tensors of a checkpoint."""
    metadata = dcp.FileSystemReader(str(directory)).read_metadata()
    return metadata.state_dict_metadata.keys()
