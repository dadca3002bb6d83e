"""Copies of the trainers' states in the memory of other processes, from which lost trainers are replaced
(--peer-checkpoint-interval).

A holder on each node (`CopyHolder`) has the copies of the ranks of its own node, and with several nodes those of the
node before it too, so that a node may be lost with its holder. The copies of one rollout count when those of all ranks
are there; only then are older ones given up, so a loss on the way leaves the ones before.

`PeerCopies` is the driver's side; `send_state` and `take_state` run in the trainers, which know what a state is made
of (slime.training.resume). Holders import this module, too: it imports next to nothing, so that they start at once and
their memory is that of the copies.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.processes.progress import went_on
from slime.ray.utils import ActorFailure, ActorLost, actor_env, get

if TYPE_CHECKING:
    from slime.ray.actor_group import RayTrainGroup
    from slime.ray.run_parts import GpuTurns

logger = logging.getLogger(__name__)
ASK_DEADLINE_S = 60.0


class PeerCopies:
    """The copies of one run.

    Args:
        interval: rollouts between two of them; None makes none.
    """

    def __init__(self, interval: int | None) -> None:
        self.interval = interval
        self.holders: dict[str, Any] = {}

    def is_due(self, rollout_id: int) -> bool:
        """Whether the states after this rollout are to be copied."""
        return self.interval is not None and (rollout_id + 1) % self.interval == 0

    def keep(self, rollout_id: int, groups: Sequence[RayTrainGroup], turns: GpuTurns) -> dict[str, float]:
        """Copy the states after a rollout, and give up older copies.

        Args:
            rollout_id: which.
            groups: the trainers.
            turns: gives each the GPU.

        Returns:
            metrics: seconds, and bytes of one copy of all states.
        """
        begin, num_bytes = time.monotonic(), 0
        for group in groups:
            turns.to_trainer(group)
            num_bytes += group.copy_state(rollout_id, self.places(group.node_ids()))
        wanted = {owner for group in groups for owner in owners_of(group.role, group.world_size)}
        if self._owners().get(rollout_id, set()) >= wanted:
            for holder in self.holders.values():
                self._ask(holder.keep_only.remote(rollout_id))
        else:
            logger.warning("a copy of the states after rollout %d was lost: the ones before stay", rollout_id)
        return {"perf/peer_copy_time": time.monotonic() - begin, "perf/peer_copy_bytes": float(num_bytes)}

    def newest(self, owners: Sequence[str]) -> int | None:
        """The newest rollout after which the copies of all these ranks are there; None where there is none."""
        found = self._owners()
        return max((rollout_id for rollout_id, there in found.items() if there >= set(owners)), default=None)

    def restore(self, rollout_id: int, groups: Sequence[RayTrainGroup], turns: GpuTurns) -> None:
        """Give new trainers, of the same layout, the states after a rollout."""
        begin = time.monotonic()
        having = {node: self._whole(holder).get(rollout_id, []) for node, holder in self.holders.items()}
        for group in groups:
            turns.to_trainer(group)
            holders = [
                [self.holders[node] for node, there in having.items() if owner in there]
                for owner in owners_of(group.role, group.world_size)
            ]
            group.restore_state(rollout_id, holders)
        seconds = time.monotonic() - begin
        logger.warning("trainers go on after rollout %d, from copies in memory (%.1f s)", rollout_id, seconds)

    def end(self) -> None:
        """End the holders."""
        for holder in self.holders.values():
            ray.kill(holder)
        self.holders.clear()

    # ---- holders

    def places(self, node_ids: Sequence[str]) -> list[list[Any]]:
        """The holders of each rank's copy, for ranks on these nodes."""
        nodes = list(dict.fromkeys(node_ids))
        holders = {node: self._holder(node) for node in nodes}
        after = dict(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
        return [[holders[node] for node in dict.fromkeys((node, after[node]))] for node in node_ids]

    def _holder(self, node_id: str) -> Any:
        """The holder on a node; another one where it was lost."""
        holder = self.holders.get(node_id)
        if holder is None or self._ask(holder.whole.remote()) is None:
            if holder is not None:
                ray.kill(holder)  # it may only be slow, and would keep its memory
            holder = self.holders[node_id] = (
                ray.remote(CopyHolder)
                .options(
                    num_cpus=0,
                    max_restarts=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                    runtime_env={"env_vars": actor_env()},
                )
                .remote()
            )
        return holder

    def _owners(self) -> dict[int, set[str]]:
        """Rollout -> owners of which a whole copy is somewhere."""
        found: dict[int, set[str]] = defaultdict(set)
        for holder in self.holders.values():
            for rollout_id, owners in self._whole(holder).items():
                found[rollout_id] |= set(owners)
        return found

    def _whole(self, holder: Any) -> dict[int, list[str]]:
        return self._ask(holder.whole.remote()) or {}

    @staticmethod
    def _ask(ref: ray.ObjectRef) -> Any:
        """A holder's answer; None where it is lost, which costs copies and not the run."""
        try:
            return get(ref, "a holder of copies", ASK_DEADLINE_S)
        except (ActorLost, TimeoutError) as error:
            logger.warning("%s", error)
            return None


PIECE_BYTES = 256 * 1024**2
PIECE_DEADLINE_S = 600.0


def owners_of(role: str, world_size: int) -> list[str]:
    """The names of the ranks of a role, in order: another number of ranks has others, for it cannot use the copies."""
    return [f"{role} {rank} of {world_size}" for rank in range(world_size)]


def send_state(trainer: Any, rollout_id: int, owner: str, holders: list[Any]) -> int:
    """Give each holder a copy of a trainer's state after a rollout.

    Args:
        trainer: has `state_tensors` and `state_values` (`slime.training.trainer.Trainer`).
        rollout_id: which.
        owner: what the copy is kept under.
        holders: handles of `CopyHolder`s; one that is lost gets none.

    Returns:
        bytes of one copy.
    """
    left, num_bytes = list(holders), 0
    left = _tell(left, "begin", rollout_id, owner)
    for piece in pieces_of(trainer.state_tensors(), PIECE_BYTES):
        left = _tell(left, "keep", rollout_id, owner, piece)
        num_bytes += sum(array.nbytes for array in piece.values())
    _tell(left, "complete", rollout_id, owner, trainer.state_values())
    return num_bytes


def take_state(trainer: Any, rollout_id: int, owner: str, holders: list[Any]) -> None:
    """Have a trainer resume from the copy that a holder has of its state.

    Args:
        trainer: has `restore_state` (`slime.training.trainer.Trainer`).
        rollout_id: see `send_state`. owner: see `send_state`.
        holders: those that have the copy; the next one is asked where one is lost.

    Raises:
        ActorLost: all of them are.
    """
    for number, holder in enumerate(holders):
        try:
            values, count = get(holder.rest.remote(rollout_id, owner), "a copy of the state", PIECE_DEADLINE_S)
            trainer.restore_state(_fetched(holder, rollout_id, owner, count), values)
            return
        except ActorLost as error:
            if number + 1 == len(holders):
                raise
            logger.warning("%s", error)
    raise ActorFailure(f"no process holds a copy of the state of {owner} after rollout {rollout_id}")


def pieces_of(tensors: Iterable[tuple[str, Any]], limit: int) -> Iterator[Piece]:
    """Name -> bytes, as many tensors at a time as have `limit` bytes together, one at least."""
    from slime.weights.delta import bytes_of  # the driver imports this module, without torch

    piece: Piece = {}
    size = 0
    for name, tensor in tensors:
        if piece and size + tensor.nbytes > limit:
            yield piece
            piece, size = {}, 0
        piece[name] = bytes_of(tensor)
        size += tensor.nbytes
    if piece:
        yield piece


def _fetched(holder: Any, rollout_id: int, owner: str, count: int) -> Iterator[Piece]:
    for number in range(count):
        what = f"piece {number} of {count} of a copy of the state"
        yield get(holder.piece.remote(rollout_id, owner, number), what, PIECE_DEADLINE_S)
        went_on("state pieces")


def _tell(holders: list[Any], method: str, *values: Any) -> list[Any]:
    """Call a method of each; returns those that are there."""
    calls = [(holder, getattr(holder, method).remote(*values)) for holder in holders]
    there = []
    for holder, ref in calls:
        try:
            get(ref, "a holder to take a piece of the state", PIECE_DEADLINE_S)
            there.append(holder)
        except (ActorLost, TimeoutError) as error:  # one that hangs is as good as lost
            logger.warning("%s", error)
    went_on("state pieces")
    return there


Piece = dict[str, Any]  # Name -> array of bytes.


class CopyHolder:
    """What it is given, by rollout and owner. An owner is a rank of a role."""

    def __init__(self) -> None:
        self._pieces: dict[int, dict[str, list[Piece]]] = defaultdict(lambda: defaultdict(list))
        self._rest: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)

    def begin(self, rollout_id: int, owner: str) -> None:
        """Forget what an owner has begun to give of a rollout."""
        self._pieces[rollout_id].pop(owner, None)
        self._rest[rollout_id].pop(owner, None)

    def keep(self, rollout_id: int, owner: str, piece: Piece) -> None:
        """Take one piece; what arrives lies in Ray's object store, and goes when its sender does."""
        self._pieces[rollout_id][owner].append({name: array.copy() for name, array in piece.items()})

    def complete(self, rollout_id: int, owner: str, rest: dict[str, Any]) -> None:
        """Take what is no tensor; the owner's copy is whole now."""
        self._rest[rollout_id][owner] = rest

    def whole(self) -> dict[int, list[str]]:
        """Rollout -> owners whose copies are whole."""
        return {rollout_id: sorted(rest) for rollout_id, rest in self._rest.items()}

    def rest(self, rollout_id: int, owner: str) -> tuple[dict[str, Any], int]:
        """What is no tensor of an owner's copy, and the number of its pieces."""
        return self._rest[rollout_id][owner], len(self._pieces[rollout_id][owner])

    def piece(self, rollout_id: int, owner: str, number: int) -> Piece:
        """One piece of an owner's copy."""
        return self._pieces[rollout_id][owner][number]

    def keep_only(self, rollout_id: int) -> None:
        """Give up the copies of other rollouts."""
        for copies in (self._pieces, self._rest):
            for other in [number for number in copies if number != rollout_id]:
                del copies[other]
