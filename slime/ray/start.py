"""How engines and trainers of a run start beside each other; whichever fails first ends the start with its error.

Wait graph: the engines wait for nobody. Trainers load (processes, imports) meanwhile in any case; where they share
memory with engines they are built only when these run, for engines count on all memory that is free when they start.
It does not know what a trainer or an engine is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from slime.ray.actor_group import RayTrainGroup
from slime.ray.gpu_turns import GpuTurns
from slime.ray.utils import get

START_DEADLINE_S = 1800.0
WITHOUT_TRAINERS: dict[str, Any] = {
    "start_rollout_id": 0,
    "parallel_config": {"dp_size": 1, "cp_size": 1},
    "warnings": [],
}


def start_side_by_side(
    groups: Sequence[RayTrainGroup], turns: GpuTurns, engines: ray.ObjectRef, *, what: str
) -> dict[str, Any]:
    """Start the trainers beside engines that are starting; returns when all of them run.

    Args:
        groups: in the order in which they take the GPU, the actor last; none without trainers.
        turns: whose turn it is on GPUs that several share.
        engines: their start, which is under way.
        what: what that is called in an error.

    Returns:
        what the actor's rank 0 says of its start, with the warnings of all; `WITHOUT_TRAINERS` without any.
    """
    loading = {ref: name for group in groups for ref, name in group.load().items()}
    if turns.engines_leave:
        get(engines, what, START_DEADLINE_S, beside=loading)
    started = turns.start_trainers(groups, {engines: what}) if groups else [WITHOUT_TRAINERS]
    get(engines, what, START_DEADLINE_S)
    return {**started[-1], "warnings": [warning for one in started for warning in one["warnings"]]}
