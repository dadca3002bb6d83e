"""What is left of a step's time after generation and computation: `perf/other_time`.

    perf/step_time = generation + log-prob passes + training (of actor and critic) + perf/other_time

The rest holds what a run does around its work: preparing and moving data, sleeping and waking up, the weight sync,
saving, evaluating. It knows only the names of metrics; who measures them and when, the caller does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PASSES = ("log_probs", "ref_log_probs", "teacher_log_probs", "critic_values", "actor_train", "critic_train")
"""Timers of the computation."""
MetricRecord = tuple[dict[str, float], str]


class StepTimes:
    """Follows the driver through its steps."""

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._generation_s = 0.0

    def waited(self, seconds: float) -> None:
        """The driver had nothing to do but to wait for a rollout that is being generated."""
        self._waited_s += seconds

    def generated(self, records: Iterable[MetricRecord]) -> None:
        """A rollout's wait is over.

        Args:
            records: metrics of its generation. Of a rollout that was generated ahead, only what the driver waited for
                counts; of one that it waited for, only the generation and not what the manager did after it.
        """
        took = _joined(records).get("perf/rollout_time", self._waited_s)
        self._generation_s += min(took, self._waited_s)
        self._waited_s = 0.0

    def trained(self, records: Iterable[MetricRecord]) -> dict[str, float]:
        """A step's training is over.

        Args:
            records: metrics of its training.

        Returns:
            `perf/other_time` in seconds; nothing where the step was not timed.
        """
        metrics, generation_s, self._generation_s = _joined(records), self._generation_s, 0.0
        if "perf/step_time" not in metrics:
            return {}
        computation_s = sum(metrics.get(f"perf/{name}_time", 0.0) for name in PASSES)
        return {"perf/other_time": metrics["perf/step_time"] - generation_s - computation_s}


def _joined(records: Iterable[MetricRecord]) -> Mapping[str, float]:
    return {name: value for metrics, _ in records for name, value in metrics.items()}
