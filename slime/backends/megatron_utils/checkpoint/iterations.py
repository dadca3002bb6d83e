"""Save and load Megatron checkpoints (torch_dist): weights, optimizer, schedule, random states.

What a checkpoint holds besides weights is chosen when it is saved (--checkpoint-contents); loading takes what is there
and starts the rest fresh. A checkpoint appears under its name only when it is complete, with a manifest of its files
(`slime.checkpoints.paths`; `slime.ray.checkpoints` looks at it before a load), and the tracker file is written
last, so that a run that is cut off leaves the previous one in force. Sharding is by global tensors: any other parallel
layout can load it. slime.training.resume deletes checkpoints that are too old.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)

from slime.backends.megatron_utils.layers.lora import base_checksum, check_base, has_adapters, is_base
from slime.backends.megatron_utils.layers.value_head import is_of_head, value_head_of
from slime.backends.megatron_utils.megatron_patch.checkpoints import BackgroundSave, loading
from slime.backends.megatron_utils.model.model_weights import is_of_adapter
from slime.backends.megatron_utils.model_provider import unwrap
from slime.backends.megatron_utils.optimizer import make_moments
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import finish_param_gather
from slime.checkpoints.paths import (
    MANIFEST_FILE,
    MODEL_SHAPE_FILE,
    TRACKER_FILE,
    Entry,
    entries_of,
    iteration_dir,
    resolve_checkpoint_dir,
    to_disk,
    write_manifest,
)
from slime.conversion.writer import put_in_place
from slime.training.backend import CheckpointSource
from slime.training.resume import gives_way_to_a_full_disk, together
from slime.utils.distributed_utils import gathered, get_gloo_group
from slime.utils.misc import on_error

logger = logging.getLogger(__name__)
WRITE_DEADLINE_S = 3600.0

# Optimizer state as one tensor per parameter, which any TP and DP size can load.
_OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}

EXTRA_STATE = "_extra_state"
"""Last part of the name of what TransformerEngine keeps for 8 bit."""


class UnfinishedCheckpoint:
    """A checkpoint of which some files may still be being written; it has no name of its own before `finish`.

    Args:
        root, iteration: which.
        partial: the directory in which it is written.
        background: what writes the tensors; None where they are written.
    """

    def __init__(self, root: Path, iteration: int | str, partial: Path, background: BackgroundSave | None) -> None:
        self._root, self._iteration, self._partial, self._background = root, iteration, partial, background

    @property
    def is_written(self) -> bool:
        """Whether the files of this rank are written."""
        return self._background is None or self._background.is_written

    def finish(self) -> Path:
        """Wait until all is written, describe it, give it its name and point the tracker at it; all ranks call it.

        Returns:
            the directory of the checkpoint.

        Raises:
            DiskFull: the disk became full; nothing of it is left, and the tracker still names the one before.
        """
        final, partial = iteration_dir(self._root, self._iteration), self._partial
        with gives_way_to_a_full_disk(partial, needed=None):
            with together(f"writing {partial}"):
                known = {} if self._background is None else self._background.finish(WRITE_DEADLINE_S)
            _describe(partial, known)
            if dist.get_rank() == 0:
                give_name(partial, self._root, self._iteration, replaces=True)
        return final


def new_directory(root: str | Path, iteration: int | str) -> Path:
    """Make an empty directory for the files of an iteration, which has no name of its own yet; all ranks call it.

    Raises:
        DiskFull: it does not fit.
    """
    final = iteration_dir(root, iteration)
    partial = final.with_name(f".{final.name}.partial")
    with gives_way_to_a_full_disk(partial, needed=None):
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    return partial


def begin_checkpoint(
    root: str | Path,
    iteration: int | str,
    *,
    model: Sequence[torch.nn.Module],
    optimizer: Any = None,
    scheduler: Any = None,
    contents: Collection[str] = ("model", "optimizer", "rng"),
    model_shape: dict[str, Any] | None = None,
    write_more: Callable[[Path], None] | None = None,
    in_background: bool = False,
) -> UnfinishedCheckpoint:
    """Write a checkpoint but for its name, or begin to: model and optimizer may change afterwards. All ranks call it.

    Args:
        root: checkpoint root; made if absent.
        iteration: its number, or "release" for weights alone.
        model: this rank's modules, wrapped or bare.
        optimizer: Megatron's, or None.
        scheduler: saved with the optimizer.
        contents: what to save of optimizer (with the schedule), schedule and rng; the weights always are.
        model_shape: the numbers of `arguments.model_shape`, kept beside the tensors for checks at parse time.
        write_more: called with the unfinished directory on every rank, to add files of its own.
        in_background: leave the tensors to processes that go on when this returns (`BackgroundSave`).

    Raises:
        DiskFull: it does not fit; nothing of it is left, and the tracker still names the one before.
    """
    partial = new_directory(root, iteration)
    for chunk in model:
        finish_param_gather(chunk)
    state = _state_to_save(iteration, model, optimizer, scheduler=scheduler, contents=contents)
    with gives_way_to_a_full_disk(partial, needed=_bytes_of(state)):
        request = dist_checkpointing.save(state, str(partial), async_sharded_save=in_background)
        if write_more is not None:
            write_more(partial)
        if dist.get_rank() == 0:
            (partial / MODEL_SHAPE_FILE).write_text(json.dumps(model_shape or {}, indent=2) + "\n")
    rank = dist.get_rank()
    background = BackgroundSave(request, partial, lambda path: _writer_of(path) == rank) if request else None
    return UnfinishedCheckpoint(Path(root), iteration, partial, background)


def _state_to_save(
    iteration: int | str,
    model: Sequence[torch.nn.Module],
    optimizer: Any,
    *,
    scheduler: Any,
    contents: Collection[str],
) -> dict[str, Any]:
    with_optimizer = "optimizer" in contents
    state = _sharded_state(model, optimizer if with_optimizer else None, is_loading=False)
    state |= {"iteration": iteration, "layout": _layout(), "has_rng": "rng" in contents}
    if has_adapters(model):
        state["base_checksum"] = base_checksum(model)
    if "rng" in contents:
        state["rng_state"] = _rng_object()
    if scheduler is not None and (with_optimizer or "schedule" in contents):
        state["opt_param_scheduler"] = scheduler.state_dict()
    return state


def _bytes_of(state: dict[str, Any]) -> int:
    """What this rank writes of the tensors: of copies, the first one."""
    kinds = (ShardedTensor, ShardedTensorFactory)
    tensors = [value for value in nested_values(state) if isinstance(value, kinds) and torch.is_tensor(value.data)]
    return sum(tensor.data.nbytes for tensor in tensors if is_main_replica(tensor.replica_id))


def _describe(directory: Path, known: dict[str, Entry]) -> None:
    """Write the manifest; each rank reads back what it has written, but for what it knows. All files are there."""
    rank = dist.get_rank()
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    mine = [path for path in files if _writer_of(path) == rank and path.relative_to(directory).as_posix() not in known]
    with together(f"reading back {directory}"):
        entries = known | entries_of(directory, mine)
    found = gathered(entries)
    if rank == 0:
        merged = {name: entry for of_rank in found for name, entry in of_rank.items()}
        write_manifest(directory / MANIFEST_FILE, merged)


def _writer_of(path: Path) -> int:
    """The rank that wrote a file of a checkpoint: torch_dist names it, rank 0 writes the others."""
    named = re.fullmatch(r"__(\d+)_\d+\.distcp", path.name)
    return int(named[1]) if named else 0


def save_weights(directory: Path, model: Sequence[torch.nn.Module]) -> None:
    """Write the model's weights alone to a new directory, without a tracker; all ranks call it."""
    with together(f"the preparation of {directory}"):
        if dist.get_rank() == 0:
            directory.mkdir(parents=True)
    dist_checkpointing.save(_sharded_state(model, None, is_loading=False), str(directory))


def load_weights(directory: Path, model: Sequence[torch.nn.Module]) -> None:
    """Load what `save_weights` wrote, with any parallel layout; all ranks call it."""
    with loading(directory):
        loaded = dist_checkpointing.load(_sharded_state(model, None, is_loading=True), str(directory))
    for name, chunk in zip(_chunk_names(model), model, strict=True):
        set_weights(chunk, loaded[name])


def give_name(partial: Path, root: Path, iteration: int | str, *, replaces: bool) -> None:
    """Give a finished directory its name, and let the tracker file name the iteration, or "release".

    Args:
        partial: the directory.
        root: checkpoint root.
        iteration: what it holds.
        replaces: whether a checkpoint of that name goes.

    Raises:
        UsageError: there is one of that name, and it is not to be replaced.
        OSError: it cannot be; the tracker names what it named before.
    """
    unnamed = root / f".{TRACKER_FILE}.partial"
    with on_error(lambda: unnamed.unlink(missing_ok=True)):
        unnamed.write_text(f"{iteration}")  # what takes room comes before anything that is seen
        to_disk(unnamed)
        put_in_place(partial, iteration_dir(root, iteration), replaces=replaces)
        os.replace(unnamed, root / TRACKER_FILE)
    to_disk(root)


def load_checkpoint(
    source: CheckpointSource, *, model: Sequence[torch.nn.Module], optimizer: Any = None, scheduler: Any = None
) -> int | None:
    """Load what `source` says into model, optimizer and schedule; all ranks call it.

    Where the optimizer's state is not loaded, or not there, its fp32 weights are taken from the loaded model, and its
    moments and the schedule stay as they are.

    Returns:
        the iteration of the checkpoint, None for a release.

    Raises:
        UsageError: no such checkpoint, or it holds what loading would run.
    """
    directory, iteration = resolve_checkpoint_dir(source.path, source.step)
    with loading(directory):
        common = dist_checkpointing.load_common_state_dict(str(directory))
    is_resumed = iteration is not None
    of_base = is_base(directory, model)
    has_state = "optimizer" in common and not of_base
    with_optimizer = is_resumed and source.load_optimizer and optimizer is not None and has_state
    with_rng = is_resumed and source.load_rng and common.get("has_rng") and common.get("layout") == _layout()
    if is_resumed:
        _say_what_is_not_there(directory, common, source)
    state = _sharded_state(model, optimizer if with_optimizer else None, is_loading=True, of_base=of_base)
    if with_optimizer and not _is_all_there(state["optimizer"], directory):
        del state["optimizer"]
        with_optimizer = False
    if with_rng:
        state["rng_state"] = _rng_object()
    names = _chunk_names(model)
    has_fresh_head = _leave_out_fresh_head(state[names[-1]], model[-1], directory)
    with loading(directory):
        loaded = dist_checkpointing.load(state, str(directory))
    for name, chunk in zip(names, model, strict=True):
        set_weights(chunk, loaded[name], strict=not (has_fresh_head and chunk is model[-1]))
    if "base_checksum" in common:
        check_base(model, common["base_checksum"], directory)
    if with_optimizer:
        optimizer.load_state_dict(loaded["optimizer"])
    elif optimizer is not None:
        optimizer.reload_model_params()
    with_schedule = with_optimizer or (is_resumed and source.load_schedule and not of_base)
    if scheduler is not None and with_schedule and "opt_param_scheduler" in loaded:
        scheduler.num_steps = 0  # Megatron adds the saved position to the present one
        scheduler.load_state_dict(loaded["opt_param_scheduler"])
    if with_rng:
        set_random_states(loaded["rng_state"])
    return iteration


def _leave_out_fresh_head(state: dict[str, Any], last_chunk: torch.nn.Module, directory: Path) -> bool:
    """Take a critic's value head out of what is to be loaded, where the checkpoint (a policy's) has none."""
    if value_head_of(last_chunk) is None:
        return False
    there = dist_checkpointing.load_tensors_metadata(str(directory))
    missing = [name for name, tensor in state.items() if is_of_head(name) and tensor.key not in there]
    for name in missing:
        del state[name]
    return bool(missing)


def _is_all_there(optimizer_state: dict[str, Any], directory: Path) -> bool:
    """Whether the checkpoint was saved by a run that trained all parameters that this one trains."""
    there = dist_checkpointing.load_tensors_metadata(str(directory))
    wanted = [value.key for value in nested_values(optimizer_state) if isinstance(value, ShardedTensor)]
    is_here = torch.tensor([int(all(key in there for key in wanted))])
    dist.all_reduce(is_here, op=dist.ReduceOp.MIN, group=get_gloo_group())
    if not is_here and dist.get_rank() == 0:
        logger.warning(
            "%s holds optimizer state of other parameters (--only-train-params-name-list, --freeze-params-name-list): "
            "its moments and the learning-rate schedule start anew",
            directory,
        )
    return bool(is_here)


def _say_what_is_not_there(directory: Path, common: dict[str, Any], source: CheckpointSource) -> None:
    """Warn once, on rank 0, about what was asked for and starts fresh."""
    if dist.get_rank() != 0:
        return
    if source.load_optimizer and "optimizer" not in common:
        logger.warning("%s holds no optimizer state: its moments and the learning-rate schedule start anew", directory)
    if source.load_schedule and "opt_param_scheduler" not in common:
        logger.warning("%s holds no learning-rate schedule: it starts anew", directory)
    if source.load_rng and not common.get("has_rng"):
        logger.warning("%s holds no random states: they start from --seed", directory)
    elif source.load_rng and common.get("layout") != _layout():
        saved = common.get("layout")
        logger.warning(
            "random states are not restored from %s: it was saved with the layout %s, which is %s now",
            *(directory, saved, _layout()),
        )


def _sharded_state(
    model: Sequence[torch.nn.Module], optimizer: Any, *, is_loading: bool, of_base: bool = False
) -> dict[str, Any]:
    chunks = zip(_chunk_names(model), model, strict=True)
    state: dict[str, Any] = {name: _weights_of(chunk, of_base=of_base) for name, chunk in chunks}
    if optimizer is not None:
        make_moments(optimizer)  # before the first step, so that there is something to save or to load into
        weights = _weights_with_state(model, state)
        options = {"is_loading": is_loading, "metadata": dict(_OPTIMIZER_FORMAT)}
        state["optimizer"] = optimizer.sharded_state_dict(weights, **options)
    return state


def _weights_of(
    chunk: torch.nn.Module, metadata: dict[str, Any] | None = None, *, of_base: bool = False
) -> dict[str, Any]:
    """The sharded weights of a chunk; where it has LoRA adapters theirs alone, or those under them (`of_base`).

    A critic's head is in both: it is trained beside adapters, and a base may be a critic.
    What TransformerEngine keeps for 8 bit is empty in 16 bit and stays out, so that a run may go on with either
    implementation.
    """
    options = {} if metadata is None else {"metadata": metadata}
    wanted = {not of_base} if has_adapters([chunk]) else {False}
    leaves = unwrap(chunk).sharded_state_dict(**options)
    head = {name for name in leaves if is_of_head(name)} if value_head_of(chunk) is not None else set()
    taken = {name for name in leaves if is_of_adapter(name) in wanted} | head
    return {name: leaf for name, leaf in leaves.items() if name in taken and not name.endswith(EXTRA_STATE)}


def set_weights(chunk: torch.nn.Module, loaded: dict[str, Any], *, strict: bool = True) -> None:
    """Give a chunk the weights that `_weights_of` left in a checkpoint."""
    module = unwrap(chunk)
    nothing = dict.fromkeys(name for name in module.state_dict() if name.endswith(EXTRA_STATE))
    module.load_state_dict(nothing | loaded, strict=strict and not has_adapters([chunk]))


def _weights_with_state(model: Sequence[torch.nn.Module], state: dict[str, Any]) -> dict[str, Any]:
    """The sharded weights as the optimizer names its state after them; `state` has those of the model."""
    by_chunk = dict(state)
    freezes = torch.tensor([int(any(not p.requires_grad for chunk in model for p in chunk.parameters()))])
    dist.all_reduce(freezes, op=dist.ReduceOp.MAX, group=get_gloo_group())
    if freezes:
        # A name of its own for each layer: of one tensor for all of them, frozen layers would be holes.
        metadata = {"non_homogeneous_layers": True}
        by_chunk = {name: _weights_of(chunk, metadata) for name, chunk in zip(by_chunk, model, strict=True)}
    return by_chunk if len(by_chunk) > 1 else next(iter(by_chunk.values()))


def _chunk_names(model: Sequence[torch.nn.Module]) -> list[str]:
    """Where each chunk's weights are in the state dict; in the file a tensor has its name in the whole model."""
    return ["model"] if len(model) == 1 else [f"model{i}" for i in range(len(model))]


def _layout() -> dict[str, int]:
    """The parallel sizes on which the meaning of per-rank random states depends."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _rng_object() -> ShardedObject:
    """This rank's random states, addressed by its place in the layout."""
    layout = _layout()
    places = {
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(),
        "cp": parallel_state.get_context_parallel_rank(),
        "tp": parallel_state.get_tensor_model_parallel_rank(),
    }
    return ShardedObject(
        "rng_state", random_states(), tuple(layout[axis] for axis in places), tuple(places.values()), replica_id=0
    )


def random_states() -> dict[str, Any]:
    """This process's random states, of all that a training draws from."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_random_states(state: dict[str, Any]) -> None:
    """Undo `random_states`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
