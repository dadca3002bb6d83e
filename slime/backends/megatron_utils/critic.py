"""MegatronCriticActor: one rank of the critic, the value model of PPO, on the same slot as the actor's of that rank.

In a rollout it is called twice: before the actor's training for the values of its rank's share, and after it to train
on the returns that the actor made of them (with the KL of the policy inside the rewards, which only the actor knows).
It keeps nothing of a rollout between the two. Its args are `parse_megatron_role_args(args, "critic")`: `value_loss`, a
value head, checkpoints of its own, no reference, no HF export. Engines know nothing of it.
"""

from __future__ import annotations

from typing import Any

from slime.backends.megatron_utils.actor import MegatronTrainActor, MetricRecord
from slime.backends.megatron_utils.passes.forward_passes import add_values
from slime.training.micro_batches import Columns, to_host
from slime.utils.train_data import RolloutBatch

TIMES = ("critic_values", "critic_train")


class MegatronCriticActor(MegatronTrainActor):
    """One rank of the critic; built as `MegatronTrainActor`."""

    role = "critic"

    def compute_values(self, rollout_id: int, refs: list[Any]) -> Columns:
        """`values` of this rank's share of a rollout, before training on it.

        Args:
            rollout_id: which.
            refs: one Box of training data per data-parallel rank.
        """
        return self.values_of(self._fetch(refs))

    def values_of(self, rollout_data: RolloutBatch) -> Columns:
        """`compute_values` of a share that is given as plain lists."""
        micro_batches = self._pack(rollout_data)
        add_values(self.args, self.state.model, micro_batches)
        return to_host({"values": micro_batches.rollout_data["values"]})

    def _train_on(self, rollout_id: int, rollout_data: RolloutBatch) -> list[MetricRecord]:
        return self._update(rollout_id, self._pack(rollout_data), prefix="train/critic-")

    def _perf(self, seconds: dict[str, float], data: RolloutBatch) -> dict[str, float]:
        return {f"perf/{name}_time": seconds[name] for name in TIMES if name in seconds}
