"""The places of a run's engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.backends.sglang_utils.external import ExternalEngine
from slime.backends.sglang_utils.server_control import Worker
from slime.config.sglang.topology import EngineGroupPlan
from slime.ray.rollout.server_group import ServerGroup
from slime.ray.rollout.servers import ModelServers

GroupOfOne = tuple[EngineGroupPlan, ServerGroup]
"""A guest that the run started itself, on a new node."""


@dataclass(eq=False)
class Seat:
    """One engine's place, whoever is in it: the place `index` of a group of ours, or an engine of somebody else's."""

    model: ModelServers
    takes_weights: bool
    worker: Worker | None
    group: ServerGroup | None = None
    index: int = 0
    kind: EngineGroupPlan | None = None  # Of the group of a guest.
    external: ExternalEngine | None = None
    is_guest: bool = False  # It has joined, and nobody takes its place when it is gone.
    is_lost: bool = False
    was_without_slots: bool = False  # Its slots were waited for, and did not come.

    @property
    def engine(self) -> Any:
        """Who is in it."""
        return self.external if self.group is None else self.group.engines[self.index]

    @property
    def is_behind_router(self) -> bool:
        """Whether we register it with its router; somebody else's router finds somebody else's engines itself."""
        return self.external is None or self.is_guest or self.model.router.is_ours
