"""A rank's state on its way to and from the processes that hold copies of it, piece by piece.

It runs in the trainer. Pieces keep what lies in Ray's object store on the way small. What the state is made of, the
trainer knows; what becomes of the copies, slime.ray.peer_copies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from slime.ray.copy_holder import Piece
from slime.ray.utils import ActorFailure, ActorLost, get
from slime.utils.progress_counts import went_on

logger = logging.getLogger(__name__)
PIECE_BYTES = 256 * 1024**2
PIECE_DEADLINE_S = 600.0


def owners_of(role: str, world_size: int) -> list[str]:
    """The names of the ranks of a role, in order: another number of ranks has others, for it cannot use the copies."""
    return [f"{role} {rank} of {world_size}" for rank in range(world_size)]


def send_state(trainer: Any, rollout_id: int, owner: str, holders: list[Any]) -> int:
    """Give each holder a copy of a trainer's state behind a rollout.

    Args:
        trainer: has `state_tensors` and `state_values` (`MegatronTrainActor`).
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
    """Have a trainer go on with the copy that a holder has of its state.

    Args:
        trainer: has `restore_state` (`MegatronTrainActor`).
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
    raise ActorFailure(f"no process holds a copy of the state of {owner} behind rollout {rollout_id}")


def pieces_of(tensors: Iterable[tuple[str, Any]], limit: int) -> Iterator[Piece]:
    """Name -> bytes, as many tensors at a time as have `limit` bytes together, one at least."""
    from slime.backends.megatron_utils.checkpoint.rank_state import (
        bytes_of,  # the driver imports this module, without torch
    )

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
