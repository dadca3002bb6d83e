"""All trainer ranks of a role as one object: every verb runs on every rank, and fails when the first rank does.

A run has a group for the actor, and with PPO one for the critic in the same slots. What ranks of the two make for each
other goes from rank to rank through Ray's object store: here it is only references.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from slime.config.args import Args
from slime.config.roles import Role, parse_megatron_role_args
from slime.observability.timer import with_slowest_rank
from slime.ray.checkpoints import resumed
from slime.ray.placement import TRAINER_SHARE, Placement
from slime.ray.train_actor import NAMES, TrainRayActor
from slime.ray.utils import ActorFailure, ActorLost, actor_env, get, in_bundle, slot_options
from slime.utils.accelerator import memory_saver

logger = logging.getLogger(__name__)

START_DEADLINE_S = 1800.0
WORK_DEADLINE_S = 24 * 3600.0  # a train step has no sensible bound of its own; a dead rank is noticed at once anyway
SLEEP_DEADLINE_S = 1800.0  # copies at some GB/s, after the slowest rank has come (--distributed-timeout-minutes)
SHUTDOWN_DEADLINE_S = 30.0
LOSS_SHOWS_S = 10.0  # ranks whose peer is gone fail in a collective, at times before Ray says who that was
# torch's, of a device or a network that fails under a process that lives on.
LINK_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError", "AcceleratorError")

Beside = Mapping[ray.ObjectRef, str]  # What is under way, and what it is called in an error.
# Per rank, columns of its share of a rollout (`slime.training.micro_batches.Columns`).
Columns = list[ray.ObjectRef]


class RayTrainGroup:
    """The ranks of one role.

    Args:
        args: the run's flags.
        placement: where the ranks sit.
        role: of the trainer; its values of --megatron-config-path are set.
        actor_cls: the actor class; another one with the methods of this group may be given, or one of ours whose own
            method goes before its trainer's, which is `self.call(name, ...)` there.

    Attributes:
        knows_engines: whether these ranks are connected to the engines.
    """

    def __init__(
        self, args: Args, placement: Placement, *, role: Role = "actor", actor_cls: type = TrainRayActor
    ) -> None:
        self.args = args = parse_megatron_role_args(args, role)
        self.role = role
        self._placement = placement
        self._actor_cls = actor_cls
        self._name = NAMES[role]
        self.world_size = len(placement.trainer_bundles)
        self.log_dir = Path(args.output_dir).resolve() / "logs"
        self._actors = self._create_actors()
        self._starting: list[ray.ObjectRef] = []
        self.knows_engines = False

    def _create_actors(self) -> list[Any]:
        args, placement = self.args, self._placement
        env = trainer_env(args.accelerator, self.world_size, args.train_env_vars, sleeps=args.offload_train)
        remote_cls = ray.remote(self._actor_cls)
        return [
            remote_cls.options(
                name=None,
                max_restarts=0,
                scheduling_strategy=in_bundle(placement.group, bundle),
                runtime_env={"env_vars": env},
                **slot_options(args.accelerator, TRAINER_SHARE),
            ).remote(args, rank, self.world_size, str(self.log_path(rank)), self.role)
            for rank, bundle in enumerate(placement.trainer_bundles)
        ]

    def log_path(self, rank: int) -> Path:
        """Where a rank writes its output."""
        return self.log_dir / f"{self._name}_{rank}.log"

    def load(self) -> Beside:
        """Begin what a rank does before it needs its GPU: its process starts and imports; returns at once.

        Returns:
            what was begun of each rank, and what it is called.
        """
        what = f"the process of the {self._name} (logs: {self.log_dir})"
        return {actor.load.remote(): what for actor in self._actors}

    def start(self, beside: Beside | None = None) -> None:
        """Begin building the trainers; returns once rank 0's process has loaded, `wait_started` waits for the rest.

        Args:
            beside: what else is under way, and ends this wait when it fails.
        """
        what = f"the process of {self._name} rank 0 (logs: {self.log_dir})"
        address, port = self._get([self._actors[0].master_address.remote()], what, START_DEADLINE_S, beside)[0]
        self._starting = [actor.init.remote(address, port) for actor in self._actors]

    def wait_started(self, beside: Beside | None = None) -> dict[str, Any]:
        """Wait until every rank is built.

        Args:
            beside: as in `start`.

        Returns:
            rank 0's "start_rollout_id", "parallel_config" and "warnings".
        """
        what = f"the start of the {self._name} (logs: {self.log_dir})"
        return self._get(self._starting, what, START_DEADLINE_S, beside)[0]

    def compute_values(self, rollout_id: int, refs: list[Any]) -> Columns:
        """What the critic says of every token of a rollout (one Box per DP rank), before training on it."""
        what = f"the {self._name}'s values of rollout {rollout_id}"
        return self._make_columns("compute_values", what, [(rollout_id, refs)] * self.world_size)[1]

    def train(
        self, rollout_id: int, refs: list[Any], columns: Columns | None = None
    ) -> tuple[list[tuple[dict[str, float], str]], Columns]:
        """Train on a rollout.

        Args:
            rollout_id: which.
            refs: one Box per DP rank.
            columns: what the other role made of it.

        Returns:
            rank 0's metric records, with how far the slowest rank lags behind, and what the other role needs of
            this training.
        """
        what = f"training the {self._name} on rollout {rollout_id}"
        per_rank = [(rollout_id, refs, of_rank) for of_rank in columns or [None] * self.world_size]
        records, made = self._make_columns("train", what, per_rank)
        return with_slowest_rank(records), made

    def save_model(self, rollout_id: int) -> str | None:
        """Write a checkpoint, or begin to (--async-save); returns why it was not written, if its disk is full."""
        return self._all("save_model", f"saving rollout {rollout_id}", rollout_id)[0]

    def save_is_written(self) -> bool:
        """Whether `finish_save` has nothing to wait for."""
        return all(self._all("save_is_written", "a look at the checkpoint", deadline_s=SLEEP_DEADLINE_S))

    def finish_save(self) -> str | None:
        """Complete the checkpoint that was begun; returns as `save_model`."""
        return self._all("finish_save", "the end of a save")[0]

    def export_problem(self) -> str | None:
        """Why the last save's HF export was not written, if its disk is full."""
        return self._all("export_problem", "a look at the HF export", deadline_s=SLEEP_DEADLINE_S)[0]

    def node_ids(self) -> list[str]:
        """The node of each rank."""
        return self._all("node_id", "where the trainers are", deadline_s=SLEEP_DEADLINE_S)

    def copy_state(self, rollout_id: int, holders: Sequence[Sequence[Any]]) -> int:
        """Copy every rank's state after a rollout to its holders (`slime.ray.peer_copies`); returns its bytes."""
        what = f"copying the states of the {self._name} after rollout {rollout_id}"
        return sum(self._each("copy_state", what, [(rollout_id, list(of_rank)) for of_rank in holders]))

    def restore_state(self, rollout_id: int, holders: Sequence[Sequence[Any]]) -> None:
        """Give every rank the state after a rollout, of which these holders have copies."""
        what = f"restoring the states of the {self._name} after rollout {rollout_id}"
        self._each("restore_state", what, [(rollout_id, list(of_rank)) for of_rank in holders])

    def connect_rollout_engines(self, engines: list[Any], engine_sizes: list[int], *, weight_version: int = 0) -> None:
        """Hand the engines, with the GPUs of each and the version of their weights, to every rank's weight updater."""
        what = "connecting the trainer to the engines"
        self._all("connect_rollout_engines", what, engines, engine_sizes, weight_version)
        self.knows_engines = True

    def update_weights(self) -> dict[str, float]:
        """Send the weights to the engines; returns rank 0's metrics."""
        return self._all("update_weights", "the weight sync")[0]

    def sleep(self) -> dict[str, float]:
        """Have every rank leave its GPU; returns rank 0's metrics."""
        return self._all("sleep", f"the {self._name}'s leaving the GPU", deadline_s=SLEEP_DEADLINE_S)[0]

    def wake_up(self) -> dict[str, float]:
        """Have every rank take its GPU again; returns rank 0's metrics."""
        return self._all("wake_up", f"the {self._name}'s return to the GPU", deadline_s=SLEEP_DEADLINE_S)[0]

    def shutdown(self, *, graceful: bool = True) -> None:
        """End the ranks; those that do not leave by themselves in time, or all when not `graceful`, are killed."""
        if graceful:
            refs = [actor.shutdown.remote() for actor in self._actors]
            ray.wait(refs, num_returns=len(refs), timeout=SHUTDOWN_DEADLINE_S)
        for actor in self._actors:
            ray.kill(actor)

    def _make_columns(self, method: str, what: str, values: Sequence[tuple[Any, ...]]) -> tuple[list[Any], Columns]:
        """As `_all`, with values of each rank, of a method that returns (something, columns); columns stay where they
        are."""
        pairs = [
            getattr(actor, method).options(num_returns=2).remote(*of_rank)
            for actor, of_rank in zip(self._actors, values, strict=True)
        ]
        done = self._get([first for first, _ in pairs], f"{what} (logs: {self.log_dir})", WORK_DEADLINE_S)
        return done, [columns for _, columns in pairs]

    def _all(self, method: str, what: str, *values: Any, deadline_s: float = WORK_DEADLINE_S) -> list[Any]:
        return self._each(method, what, [values] * self.world_size, deadline_s)

    def _each(
        self, method: str, what: str, values: Sequence[tuple[Any, ...]], deadline_s: float = WORK_DEADLINE_S
    ) -> list[Any]:
        """As `_all`, with values of each rank."""
        calls, name = zip(self._actors, values, strict=True), f"{self._actor_cls.__name__}.{method}"
        if hasattr(self._actor_cls, method):
            refs = [getattr(actor, method).remote(*of_rank) for actor, of_rank in calls]
        else:
            refs = [actor.call.options(name=name).remote(method, *of_rank) for actor, of_rank in calls]
        return self._get(refs, f"{what} (logs: {self.log_dir})", deadline_s)

    def _get(
        self, refs: Sequence[ray.ObjectRef], what: str, deadline_s: float, beside: Beside | None = None
    ) -> list[Any]:
        """As `slime.ray.utils.get`, of a call of every rank; the loss of one is said, whoever failed first of it."""
        try:
            return get(refs, what, deadline_s, beside=beside)
        except ActorFailure as error:
            if lost := _lost(refs):
                ranks = ", ".join(map(str, lost))
                first = "" if isinstance(error, ActorLost) else f"; another said first: {error}"
                message = f"{what} failed: {self._name} rank {ranks} of {self.world_size} is lost{first}"
                raise ActorLost(message, error.details) from None
            if any(f" failed: {kind}" in str(error) for kind in LINK_ERRORS):
                raise ActorLost(str(error), error.details) from None
            raise


def _lost(refs: Sequence[ray.ObjectRef]) -> list[int]:
    """Which of these calls can never be answered, because the process that was asked is gone."""
    ray.wait(list(refs), num_returns=len(refs), timeout=LOSS_SHOWS_S, fetch_local=False)
    return [number for number, ref in enumerate(refs) if _is_lost(ref)]


def _is_lost(ref: ray.ObjectRef) -> bool:
    try:
        ray.get(ref, timeout=0)
    except RayError as error:  # any other end, or none yet, is no loss
        return isinstance(error, RayActorError)
    return False


def trainer_env(accelerator: str, world_size: int, more: Mapping[str, str], *, sleeps: bool = False) -> dict[str, str]:
    """Environment of a trainer rank.

    Args:
        accelerator: "cpu" or "cuda".
        world_size: ranks that share the cores.
        more: of --train-env-vars, which was checked to contradict nothing that is set here.
        sleeps: whether it leaves its GPU at times, for which its memory must be managed (--offload-train).
    """
    if accelerator == "cpu":
        num_threads = max(1, len(os.sched_getaffinity(0)) // world_size)
        # Threads that wait must sleep: spinning, they take the core that an engine or another rank needs.
        return actor_env({"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE", **more})
    # SGLang sets the first in its own process; the two ends of a communicator must agree or NCCL fails.
    fixed = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    saver = memory_saver.environment({**os.environ, **more}) if sleeps else {}
    return actor_env({**fixed, **more, **saver})


class ReleasedTrainGroup(RayTrainGroup):
    """The ranks of the actor.

    Args:
        args: the run's flags.
        placement: where the ranks sit.
        actor_cls: the actor class; another one with the methods of this group may be given, or one of ours whose own
            method goes before its trainer's, which is `self.call(name, ...)` there.
    """

    def __init__(self, args: Args, placement: Placement, *, actor_cls: type = TrainRayActor) -> None:
        super().__init__(args, placement, actor_cls=actor_cls)
        self._is_awake = False

    def wait_started(self, beside: Beside | None = None) -> dict[str, Any]:
        """See `RayTrainGroup`."""
        started = super().wait_started(beside)
        self._is_awake = True
        return started

    def save_model(self, rollout_id: int) -> str | None:
        """Write the checkpoint that the next trainers begin from.

        Raises:
            ActorFailure: its disk is full.
        """
        if why := super().save_model(rollout_id):
            raise ActorFailure(f"--release-train cannot go on without the checkpoint of rollout {rollout_id}: {why}.")
        self.args = resumed(self.args)
        return None

    def sleep(self) -> dict[str, float]:
        """End the trainers, and have the next ones import what they need meanwhile."""
        start = time.monotonic()
        self.shutdown()
        self._actors = self._create_actors()
        self.load()
        return {"perf/sleep_time": time.monotonic() - start}

    def wake_up(self) -> dict[str, float]:
        """Start new trainers; they are not connected to any engine yet."""
        start = time.monotonic()
        self.start()
        self.wait_started()
        self.knows_engines = False
        return {"perf/wake_up_time": time.monotonic() - start}

    def shutdown(self, *, graceful: bool = True) -> None:
        """See `RayTrainGroup`; trainers that were not built have nothing to end."""
        super().shutdown(graceful=graceful and self._is_awake)
        self._is_awake = False
