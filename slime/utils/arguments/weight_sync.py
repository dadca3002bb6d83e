"""Flags of the weight sync from trainer to engines. Declarations only."""

from __future__ import annotations

from dataclasses import dataclass

from slime.utils.arguments.flags import flag


@dataclass
class WeightSyncFlags:
    """Weight sync."""

    update_weight_buffer_size: int = flag(512 * 1024**2, "bytes of one bucket of weights", at_least=1)
    update_weights_interval: int = flag(
        1, "train_async.py: sync the weights every N rollouts (train.py: every rollout)", at_least=1
    )
    update_weight_transport: str = flag(
        "nccl", "how weights travel without --colocate: the device's collective (NCCL, on CPU gloo)", choices=("nccl",)
    )
