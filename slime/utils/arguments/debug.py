"""Flags for running a part of the system. Declarations only."""

from __future__ import annotations

from dataclasses import dataclass

from slime.utils.arguments.flags import flag


@dataclass
class DebugFlags:
    """Debug."""

    debug_train_only: bool = flag(False, "start no engines (supervised fine-tuning, replay)")
    save_debug_rollout_data: str | None = flag(None, "template with {rollout_id}: file that gets a rollout's samples")
