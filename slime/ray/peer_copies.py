"""Copies of the trainers' states in the memory of other processes, from which lost trainers are replaced
(--peer-checkpoint-interval).

A holder on each node (slime.ray.copy_holder) has the copies of the ranks of its own node, and with several nodes those
of the node before it too, so that a node may be lost with its holder. The copies of one rollout count when those of
all ranks are there; only then are older ones given up, so a loss on the way leaves the ones before.

`PeerCopies` is the driver's side. It knows which ranks there are and where they sit; what a state is made of, the
trainer knows (slime.backends.megatron_utils.checkpoint.rank_state).
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.ray.actor_group import RayTrainGroup
from slime.ray.copy_holder import CopyHolder
from slime.ray.gpu_turns import GpuTurns
from slime.ray.peer_state import owners_of
from slime.ray.utils import ActorLost, actor_env, get

logger = logging.getLogger(__name__)
ASK_DEADLINE_S = 60.0


class PeerCopies:
    """The copies of one run.

    Args:
        interval: rollouts between two of them; None makes none.
    """

    def __init__(self, interval: int | None) -> None:
        self.interval = interval
        self._holders: dict[str, Any] = {}

    def is_due(self, rollout_id: int) -> bool:
        """Whether the states behind this rollout are to be copied."""
        return self.interval is not None and (rollout_id + 1) % self.interval == 0

    def keep(self, rollout_id: int, groups: Sequence[RayTrainGroup], turns: GpuTurns) -> dict[str, float]:
        """Copy the states behind a rollout, and give up older copies.

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
            num_bytes += group.copy_state(rollout_id, self._places(group.node_ids()))
        wanted = {owner for group in groups for owner in owners_of(group.role, group.world_size)}
        if self._owners().get(rollout_id, set()) >= wanted:
            for holder in self._holders.values():
                self._ask(holder.keep_only.remote(rollout_id))
        else:
            logger.warning("a copy of the states behind rollout %d was lost: the ones before stay", rollout_id)
        return {"perf/peer_copy_time": time.monotonic() - begin, "perf/peer_copy_bytes": float(num_bytes)}

    def newest(self, owners: Sequence[str]) -> int | None:
        """The newest rollout behind which the copies of all these ranks are there; None where there is none."""
        found = self._owners()
        return max((rollout_id for rollout_id, there in found.items() if there >= set(owners)), default=None)

    def restore(self, rollout_id: int, groups: Sequence[RayTrainGroup], turns: GpuTurns) -> None:
        """Give new trainers, of the same layout, the states behind a rollout."""
        begin = time.monotonic()
        having = {node: self._whole(holder).get(rollout_id, []) for node, holder in self._holders.items()}
        for group in groups:
            turns.to_trainer(group)
            holders = [
                [self._holders[node] for node, there in having.items() if owner in there]
                for owner in owners_of(group.role, group.world_size)
            ]
            group.restore_state(rollout_id, holders)
        seconds = time.monotonic() - begin
        logger.warning("trainers go on behind rollout %d, from copies in memory (%.1f s)", rollout_id, seconds)

    def end(self) -> None:
        """End the holders."""
        for holder in self._holders.values():
            ray.kill(holder)
        self._holders.clear()

    # ---- holders

    def _places(self, node_ids: Sequence[str]) -> list[list[Any]]:
        """The holders of each rank's copy, for ranks on these nodes."""
        nodes = list(dict.fromkeys(node_ids))
        holders = {node: self._holder(node) for node in nodes}
        after = dict(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
        return [[holders[node] for node in dict.fromkeys((node, after[node]))] for node in node_ids]

    def _holder(self, node_id: str) -> Any:
        """The holder on a node; another one where it was lost."""
        holder = self._holders.get(node_id)
        if holder is None or self._ask(holder.whole.remote()) is None:
            if holder is not None:
                ray.kill(holder)  # it may only be slow, and would keep its memory
            holder = self._holders[node_id] = (
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
        for holder in self._holders.values():
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
