"""Sending the trainer's weights to the engines: one interface, one class per transport."""

from __future__ import annotations

from typing import Any

from slime.backends.megatron_utils.update_weight.base import WeightSyncError, WeightUpdater

__all__ = ["WeightSyncError", "WeightUpdater", "build_weight_updater"]


def build_weight_updater(args: Any, model: list[Any], *, colocated: bool) -> WeightUpdater:
    """The updater for this run's transport.

    Args:
        args: the run's flags.
        model: this rank's Megatron model chunks.
        colocated: trainer and engines share their slots, so that memory can be handed over.
    """
    if args.update_weight_transport == "disk":
        from slime.backends.megatron_utils.update_weight.from_disk import DiskWeightUpdater
        from slime.backends.megatron_utils.update_weight.from_disk_delta import DeltaWeightUpdater

        return (DeltaWeightUpdater if args.update_weight_mode == "delta" else DiskWeightUpdater)(args, model)
    # Imported here: both reach SGLang's classes, which takes seconds to import.
    if colocated:
        from slime.backends.megatron_utils.update_weight.from_tensor import TensorWeightUpdater

        return TensorWeightUpdater(args, model)
    from slime.backends.megatron_utils.update_weight.from_distributed import DistributedWeightUpdater

    return DistributedWeightUpdater(args, model)
