"""The process that holds copies of trainers' states (--peer-checkpoint-interval): a Ray actor on each node.

It keeps what it is given and knows neither ranks nor when copies are complete. It imports next to nothing, so that it
starts at once and its memory is that of the copies.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

Piece = dict[str, Any]
"""Name -> array of bytes."""


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
