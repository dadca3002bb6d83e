"""Joining the trainer's process group, with an answer where a stock server would hang.

SGLang joins in its scheduler, which does nothing else meanwhile: where it cannot reach the trainer, it is silent for
up to half an hour. Installed in the server process, it first connects to the trainer's address, with a deadline of
seconds, and says what is in the way; with the backend "probe" that is all it does. A group of the same name, of an
earlier attempt or of trainers of before, is left first. It does not know what a group is for.
"""

from __future__ import annotations

from typing import Any

from slime.utils.network import out_of_reach

PROBE = "probe"
"""In the place of a backend: only see whether the address can be reached."""


def install() -> None:
    """Change the server that runs in this process; imports SGLang."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    join = WeightUpdater.init_weights_update_group

    def probe_and_join(
        updater: Any,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "nccl",
    ) -> tuple[bool, str]:
        refusal = out_of_reach(master_address, master_port)
        if refusal is not None:
            return False, refusal
        if backend == PROBE:
            return True, "within reach"
        if group_name in updater._model_update_group:
            updater.destroy_weights_update_group(group_name)
        found: tuple[bool, str] = join(
            updater, master_address, master_port, rank_offset, world_size, group_name, backend
        )
        return found

    WeightUpdater.init_weights_update_group = probe_and_join
