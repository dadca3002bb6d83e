"""The Ray actor around one rank of the trainer, a plain class of its backend (`TRAINERS`), made inside its process.

It forwards calls, and says which collective of torch.distributed its process is in. Nothing is recorded while
collectives run: `CollectiveState.look`, called every now and then from another thread, reads the stacks of this
process. The number of operations that each group has begun comes from torch; the rank with the lowest one is the
rank that others wait for.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import ray

from slime.backends.sglang_utils import weight_transfer
from slime.config.args import Args
from slime.config.roles import Role
from slime.observability.logging_utils import collect_warnings, configure_logger
from slime.observability.profiler import memory_after
from slime.processes.directories import use_private_temp_dir
from slime.ray.peer_copies import owners_of, send_state, take_state
from slime.ray.utils import RayActor, check_network, publish_progress, redirect_output
from slime.utils import accelerator
from slime.utils.errors import UsageError
from slime.utils.http.api_keys import use_keys
from slime.utils.http.network import SLIME_HOST_IP_ENV, out_of_reach
from slime.utils.misc import load_function
from slime.weights.transports import MEMORY

logger = logging.getLogger(__name__)

SPARE = 0.1  # Of a GPU: what engines that stay find free beside a trainer
NAMES: dict[Role, str] = {"actor": "trainer", "critic": "critic"}  # What the ranks of a role are called in logs.

TRAINERS: dict[str, dict[Role, str]] = {
    "megatron": {
        "actor": "slime.backends.megatron_utils.actor.MegatronTrainActor",
        "critic": "slime.backends.megatron_utils.actor.MegatronCriticActor",
    },
    "fsdp": {
        "actor": "slime.backends.fsdp_utils.actor.FsdpTrainActor",
        "critic": "slime.backends.fsdp_utils.actor.FsdpCriticActor",
    },
}
"""--train-backend -> where the trainer of each role is."""


class TrainRayActor(RayActor):
    """One trainer rank, of the actor or of the critic."""

    def __init__(self, args: Args, rank: int, world_size: int, log_path: str, role: Role = "actor") -> None:
        redirect_output(log_path)
        use_private_temp_dir()
        self._name = f"{NAMES[role]} {rank}"
        configure_logger(self._name)
        use_keys(vars(args).get("run_keys"))
        publish_progress(self._name, CollectiveState().look)
        self.args, self.rank, self.world_size, self._role = args, rank, world_size, role
        self._actor: Any = None
        self._has_trained = False

    def load(self) -> None:
        """Import what a trainer is made of. That takes half a minute on some machines and no GPU: engines that start
        meanwhile find theirs untouched."""
        # Imported here: the driver imports this module, and must not load torch.distributed and megatron for it. The
        # patches come first: some work only on a megatron that is not yet imported.
        from slime.backends.megatron_utils import megatron_patch

        check_network(self._name, uses_nccl=self.args.accelerator == "cuda")
        start, is_first = time.monotonic(), "slime.backends.megatron_utils.actor" not in sys.modules
        megatron_patch.apply(self.args.accelerator)
        self._trainer_class()
        if is_first and self._role == "actor" and not self.args.debug_train_only:
            self._preload_sync()
        if is_first:
            logger.info("imported everything in %.1f s", time.monotonic() - start)

    def _preload_sync(self) -> None:
        """Import what the first weight sync needs, and start the process that it asks whether CUDA IPC works."""
        from slime.backends.megatron_utils.update_weight import way_of

        if self.args.accelerator == "cuda" and way_of(self.args, colocated=self.args.colocate) is MEMORY:
            weight_transfer.start_opener()
        weight_transfer.preload()

    def _trainer_class(self) -> Callable[..., Any]:
        """The class of this rank's trainer; importing it takes long."""
        return load_function(TRAINERS[self.args.train_backend][self._role])

    def init(self, master_addr: str, master_port: int) -> dict[str, Any]:
        """Build the trainer of this rank; the first that takes the GPU.

        Returns:
            what `MegatronTrainActor.init` does, its "parallel_config" and the "warnings" on the way.
        """
        self.load()
        if self.rank > 0 and (refusal := out_of_reach(master_addr, master_port)) is not None:
            raise UsageError(
                f"{self._name} cannot reach rank 0: {refusal}. Let the hosts reach each other on all ports; where "
                f"{master_addr} is the wrong address of its host, start Ray there with --node-ip-address, or with "
                f"{SLIME_HOST_IP_ENV} in its environment."
            )
        self._actor = self._trainer_class()(
            self.args,
            rank=self.rank,
            world_size=self.world_size,
            master_addr=master_addr,
            master_port=self._listener or master_port,
            # Ray shows each actor only the GPU of its bundle, so every rank's own GPU is number 0.
            local_rank=0,
        )
        with collect_warnings() as warnings:
            started = self._actor.init()
        _settle()
        return {**started, "parallel_config": self._actor.parallel_config(), "warnings": warnings}

    def compute_values(self, rollout_id: int, refs: list[Any]) -> tuple[None, dict[str, Any]]:
        """What the critic says of this rank's share of the rollout: nothing for the driver, columns for the actor."""
        columns = self._actor.compute_values(rollout_id, refs)
        self._make_room()
        return None, columns

    def train(
        self, rollout_id: int, refs: list[Any], columns: dict[str, Any] | None
    ) -> tuple[list[tuple[dict[str, float], str]], dict[str, Any]]:
        """Train on this rank's share of the rollout, with the columns that the other role made of it.

        Returns:
            metric records for the driver (of use on rank 0), and columns for the other role.
        """
        records = self._actor.train(rollout_id, refs, columns)
        self._make_room()
        if not self._has_trained:
            self._has_trained = True
            _settle()  # what was compiled on the way
        if self._role == "actor":
            records.append(({**memory_after("train"), "rollout/step": rollout_id}, "rollout/step"))
        return records, self._actor.columns_for_critic

    def _make_room(self) -> None:
        """Give back what torch keeps for the next step where the others on this GPU need it now, or hardly have any.

        Engines that stay take memory for a larger batch, too, and torch gives its cache up for its own process alone:
        with batches of many shapes that grows until nothing is left.
        """
        others_come = (self.args.colocate and self.args.offload_rollout) or self.args.use_critic
        if others_come or (self.args.colocate and accelerator.free_share() < SPARE):
            accelerator.empty_cache()

    def call(self, verb: str, *values: Any) -> Any:
        """Call a verb of this rank's trainer; a full disk is an answer, for the run goes on."""
        from slime.training.resume import DiskFull

        try:
            return getattr(self._actor, verb)(*values)
        except DiskFull as error:
            return str(error)

    def node_id(self) -> str:
        """Ray's name of the node that this rank is on."""
        return str(ray.get_runtime_context().get_node_id())

    def copy_state(self, rollout_id: int, holders: list[Any]) -> int:
        """Give holders (`slime.ray.peer_copies.CopyHolder`) a copy of this rank's state; returns its bytes.

        A holder that is lost gets none; the copies of the others count.
        """
        return send_state(self._actor, rollout_id, self._owner, holders)

    def restore_state(self, rollout_id: int, holders: list[Any]) -> None:
        """Take over the copy that the first of these holders which answers has of this rank's state."""
        take_state(self._actor, rollout_id, self._owner, holders)

    @property
    def _owner(self) -> str:
        return owners_of(self._role, self.world_size)[self.rank]

    def shutdown(self) -> None:
        """Leave the process groups."""
        if self._actor is not None:
            self._actor.shutdown()


def _settle() -> None:
    """Say that the objects that are here now stay: the collection before each sleep need not look through them."""
    gc.collect()
    gc.freeze()


_MODULE = "torch/distributed/distributed_c10d.py"


class CollectiveState:
    """What was seen so far."""

    def __init__(self) -> None:
        self._last: dict[str, Any] | None = None
        self._since = 0.0

    def look(self) -> dict[str, Any]:
        """{"last": the collective that was seen last, "begun": {group: operations}}; empty without process groups."""
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return {}
        found = next(filter(None, map(_collective_in, sys._current_frames().values())), None)
        now = time.time()
        if found is not None:
            is_same = self._last is not None and self._last["call"] == found
            self._since = self._since if is_same else now
            self._last = {"call": found, "seen": _clock(now), "in_it": True, "since": _clock(self._since)}
        elif self._last is not None:
            self._last["in_it"] = False
        return {"last": dict(self._last) if self._last else None, "begun": _begun(dist)}


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _collective_in(frame: FrameType | None) -> str | None:
    """The function of torch.distributed that a stack is in, and the line outside torch that called it."""
    name = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(_MODULE) and not frame.f_code.co_name.startswith("_"):
            name = frame.f_code.co_name
        elif name is not None and "/torch/" not in file:
            return f"{name} at {'/'.join(file.split('/')[-3:])}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return name


def _begun(dist: Any) -> dict[str, int]:
    """Operations that each process group of this rank has begun, as far as its backend counts them."""
    counts = {}
    for group in list(dist.distributed_c10d._world.pg_names):
        try:
            counts[str(group.group_desc or group.group_name)] = int(group._get_sequence_number_for_group())
        except (RuntimeError, AttributeError):
            continue  # not every backend counts
    return counts
