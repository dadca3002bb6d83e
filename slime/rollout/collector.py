"""Sorts the finished groups of a rollout: accepted, dropped by the filter, failed, or to be given back.

It decides what --on-sample-error, --on-untrusted-reward drop, --partial-rollout and the dynamic filter make of one.
When groups are started, and when the rollout is over, slime.rollout.sglang_rollout decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

from slime.config.args import Args
from slime.config.lora_policies import policies_of
from slime.rollout.filter_hub import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.hooks.sample_errors import SampleError, blame, hook_name, stray_cancellation
from slime.rollout.rm_hub import take_reward_failures
from slime.rollout.sampling.generation import GREEDY_REWARD, GenerateState, is_unfinished
from slime.rollout.sampling.scoring import START, take_untrusted_retries
from slime.rollout.tool_calls import take_tool_timeouts
from slime.utils.misc import load_function
from slime.utils.types import Sample
from slime.weights.adapters import POLICY

logger = logging.getLogger(__name__)
Group = list[Sample]
_WARN_AFTER_BATCHES = 5
_LEAST_FAILURES = 16
_MAX_FAILURES_PER_PROMPT = 4
_UNTRUSTED = DynamicFilterOutput(keep=False, reason="untrusted_reward")


class Collector:
    """The groups of one rollout.

    Args:
        args: reads the flags of filter, errors, partial rollouts and batch size.
        rollout_id: the rollout.

    Attributes:
        batch_size: groups of a whole batch: `rollout_batch_size`, of each policy where there are several.
        accepted: groups of the batch, at most so many.
        dropped: finished groups that the filter dropped.
        unused: groups to give back to the data source.
    """

    def __init__(self, args: Args, rollout_id: int) -> None:
        self.args, self.rollout_id = args, rollout_id
        path = args.dynamic_sampling_filter_path
        self._filter = load_function(path) if path else None
        self._filter_name = f"--dynamic-sampling-filter-path {hook_name(path)}" if path else ""
        self._drops = MetricGatherer()
        self._failures: Counter[str] = Counter()
        self._tries: Counter[int | None] = Counter()
        self._num_aborted_by_engine = 0
        self.batch_size = args.rollout_batch_size * max(1, len(policies_of(args)))
        self.accepted: list[Group] = []
        self.dropped: list[Group] = []
        self.unused: list[Group] = []

    def take(self, state: GenerateState, task: asyncio.Task[Group]) -> int:
        """Sort one finished task; returns 1 when its group was accepted, else 0.

        Raises:
            SampleError: a sample failed, and --on-sample-error says that this ends the rollout.
            RuntimeError: group after group is dropped, fails, or is aborted by an engine.
        """
        untouched = state.pendings.pop(task)
        is_full = self._is_full(untouched)
        try:
            if task.cancelled():
                raise stray_cancellation(untouched)
            group = task.result()
            if is_full:
                self.unused.append(self.give_back(group, untouched))
                state.remaining_batch_size -= 1
                return 0
            if is_unfinished(self.args, group):
                self._take_aborted(group, untouched)
                state.remaining_batch_size -= 1
                return 0
            if self.offer(group, num_expected=state.remaining_batch_size):
                return 1
        except SampleError as error:
            self._take_failed(state, untouched, error, is_needed=not is_full)
            return 0
        state.remaining_batch_size -= 1
        return 0

    def _is_full(self, group: Group) -> bool:
        """Whether the batch has all groups of this one's policy."""
        if self.batch_size == self.args.rollout_batch_size:
            return len(self.accepted) >= self.batch_size
        policy = group[0].metadata.get(POLICY)
        there = sum(accepted[0].metadata.get(POLICY) == policy for accepted in self.accepted)
        return there >= self.args.rollout_batch_size

    def offer(self, group: Group, *, num_expected: int) -> bool:
        """Accept a finished group into the batch, or drop it as the dynamic filter or --on-untrusted-reward says.

        Args:
            num_expected: groups that are accepted or in flight, this one included.

        Returns:
            whether it is in the batch.

        Raises:
            SampleError: the filter failed.
            RuntimeError: the filter drops group after group.
        """
        verdict = self._judge(group)
        if should_drop_dynamic_filter_output(
            verdict, remaining_batch_size=num_expected, target_data_size=self.batch_size
        ):
            self._drop(group, verdict.reason)
            return False
        self.accepted.append(group)
        return True

    def _judge(self, group: Group) -> DynamicFilterOutput:
        """The filter sees no sample whose reward says nothing; a group without any other has nothing to train on."""
        known = [sample for sample in group if sample.counts(self.args)]
        if len(known) < len(group) and self.args.on_untrusted_reward == "drop":
            return _UNTRUSTED
        if self._filter is None:
            return DynamicFilterOutput(keep=True)
        if not known:
            return _UNTRUSTED
        with blame(self._filter_name, group[0]):
            return call_dynamic_filter(self._filter, self.args, known)

    def give_back(self, group: Group | None, untouched: Group) -> Group:
        """What returns to the data source of a group that is not used.

        With --partial-rollout it is the group with what it has, if that can be continued: each sample is still itself
        (no fan-out), and something was generated. Otherwise the group as it was when it was started.

        Args:
            group: as its task left it; None when the task failed or was cancelled.
        """
        if not self.args.partial_rollout or group is None or not _can_continue(group, untouched):
            return untouched
        for sample in group:
            if sample.response_length:
                sample.metadata.setdefault(START, self.rollout_id)
        return group

    def _take_aborted(self, group: Group, untouched: Group) -> None:
        self.unused.append(self.give_back(group, untouched))
        self._num_aborted_by_engine += 1
        logger.warning("an engine aborted a sample of prompt group %s; it is generated again", group[0].group_index)
        if self._num_aborted_by_engine > max(10, self.batch_size):
            raise RuntimeError(
                f"engines aborted {self._num_aborted_by_engine} groups although this rollout was not ending; "
                "see the engine logs (memory, timeouts), or what the custom generate function sets as status"
            )

    def _take_failed(self, state: GenerateState, untouched: Group, error: SampleError, *, is_needed: bool) -> None:
        """A group whose generation or scoring failed: again, without it, or not at all."""
        policy, first = self.args.on_sample_error, untouched[0].index
        if not is_needed:
            logger.warning("a group beyond the batch failed and goes back to the data source: %s", error)
            self.unused.append(untouched)
            return
        if policy == "fail":
            raise error
        state.remaining_batch_size -= 1
        if policy == "retry" and not error.is_final and self._tries[first] < self.args.max_group_retries:
            self._tries[first] += 1
            self._failures["retried_groups"] += 1
            logger.warning("try %d of a group failed and is repeated: %s", self._tries[first], error)
            state.submit_generate_tasks([untouched])
            return
        self._failures["dropped_groups"] += 1
        logger.warning("a group failed and is replaced by another prompt: %s", error)
        num_dropped = self._failures["dropped_groups"]
        if num_dropped > max(_LEAST_FAILURES, _MAX_FAILURES_PER_PROMPT * self.batch_size):
            raise RuntimeError(
                f"--on-sample-error {policy}: {num_dropped} groups of rollout {self.rollout_id} failed, "
                f"{len(self.accepted)} of {self.batch_size} were accepted; the last error: {error}"
            ) from error

    def _drop(self, group: Group, reason: str | None) -> None:
        self.dropped.append(group)
        self._drops.on_dynamic_filter_drop(reason)
        batch, num_dropped = self.batch_size, self._drops.num_dropped
        name = self._filter_name or "--on-untrusted-reward drop"
        found = (
            f"{name} dropped {num_dropped} groups in rollout {self.rollout_id}, {len(self.accepted)} of "
            f"{batch} were accepted: {self._drops.collect()}"
        )
        if num_dropped == _WARN_AFTER_BATCHES * batch:
            logger.warning("%s", found)
        rounds = self.args.max_dynamic_sampling_rounds
        if num_dropped >= rounds * batch:
            raise RuntimeError(f"{found}; --max-dynamic-sampling-rounds is {rounds}")

    def metrics(self) -> dict[str, float]:
        """What happened beside the samples: drops by reason, failures, resumed samples, the greedy baseline."""
        metrics: dict[str, float] = dict(self._drops.collect())
        num_dropped = self._drops.num_dropped + self._failures["dropped_groups"]
        if self._filter is not None or num_dropped:
            metrics["rollout/dropped_ratio"] = num_dropped / max(num_dropped + len(self.accepted), 1)
        metrics |= {f"rollout/sample_errors/{name}": float(count) for name, count in self._failures.items()}
        if aborted := self._num_aborted_by_engine:
            metrics["rollout/aborted_ratio"] = aborted / (aborted + len(self.accepted))
        if lost := take_reward_failures():
            metrics["rollout/reward_failures"] = float(lost)
        if again := take_untrusted_retries():
            metrics["rollout/untrusted_retries"] = float(again)
        if late := take_tool_timeouts():
            metrics["rollout/tool_timeouts"] = float(late)
        samples = [sample for group in self.accepted for sample in group]
        if self.args.partial_rollout:
            resumed = sum(sample.metadata.get(START, self.rollout_id) != self.rollout_id for sample in samples)
            metrics["rollout/partial_rollout/resumed_samples"] = float(resumed)
        known = [group for group in self.accepted if any(sample.counts(self.args) for sample in group)]
        if baselines := [one[0].metadata[GREEDY_REWARD] for one in known if GREEDY_REWARD in one[0].metadata]:
            metrics["rollout/greedy_reward"] = sum(baselines) / len(baselines)
        return metrics


def _can_continue(group: Sequence[Sample], untouched: Sequence[Sample]) -> bool:
    is_itself = [sample.index for sample in group] == [sample.index for sample in untouched]
    return is_itself and any(sample.response_length for sample in group)
