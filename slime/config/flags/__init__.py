"""slime's flags, one dataclass per group; `FLAG_CLASSES` has them in the order of --help."""

from __future__ import annotations

from slime.config.flags.rollout import DataFlags, EvalFlags, RolloutBufferFlags, RolloutFlags, WeightSyncFlags
from slime.config.flags.run import (
    AskFlags,
    CiFlags,
    ClusterFlags,
    DebugFlags,
    FaultToleranceFlags,
    ObservabilityFlags,
    ProfileFlags,
)
from slime.config.flags.train import (
    AlgorithmFlags,
    CheckpointFlags,
    DistillationFlags,
    ModelPartFlags,
    RewardFlags,
    TrainFlags,
)

FLAG_CLASSES: tuple[type, ...] = (
    AskFlags,
    ClusterFlags,
    CheckpointFlags,
    DataFlags,
    RolloutFlags,
    RolloutBufferFlags,
    RewardFlags,
    AlgorithmFlags,
    DistillationFlags,
    EvalFlags,
    TrainFlags,
    ModelPartFlags,
    WeightSyncFlags,
    FaultToleranceFlags,
    ObservabilityFlags,
    ProfileFlags,
    DebugFlags,
    CiFlags,
)
