"""The default rollout function: groups generated concurrently until enough were accepted, the rest aborted.

Departs from upstream in three points:
1. Prompts of aborted and surplus groups go back to the data source, fresh, so that no prompt is lost.
2. A group that an engine aborted by itself is generated again instead of being trained on.
3. Endless filtering ends with an error that names the filter.

What one sample goes through is in slime.rollout.generation, evaluation in slime.rollout.eval.
"""

from __future__ import annotations

import asyncio
import logging
import time
from argparse import Namespace
from typing import Any

from slime.backends.sglang_utils import server_control
from slime.observability.progress import progress_bar
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.eval import eval_rollout, eval_rollout_single_dataset
from slime.rollout.filter_hub.base_types import MetricGatherer, call_dynamic_filter, should_drop_dynamic_filter_output
from slime.rollout.generation import (
    GenerateState,
    generate,
    generate_and_rm,
    generate_and_rm_group,
)
from slime.rollout.model_urls import get_model_url, router_url
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.utils import async_utils
from slime.utils.misc import load_function
from slime.utils.types import Sample

__all__ = [
    "GenerateState",
    "abort",
    "eval_rollout",
    "eval_rollout_single_dataset",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_model_url",
]
logger = logging.getLogger(__name__)
Group = list[Sample]
_ABORT_EVERY_S = 1.0
_ABORT_DEADLINE_S = 60.0
_MAX_DROPPED_PER_PROMPT = 100


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """One training rollout of rollout_batch_size groups, or one evaluation.

    Args:
        args: the flags.
        rollout_id: number of the rollout.
        data_source: gives prompts and takes unused ones back.
        evaluation: evaluate args.eval_datasets instead.
    """
    if evaluation:
        return async_utils.run(eval_rollout(args, rollout_id))
    output, unused = async_utils.run(generate_rollout_async(args, rollout_id, data_source))
    if unused:
        data_source.add_samples(unused)
    return output


async def generate_rollout_async(
    args: Namespace, rollout_id: int, data_source: Any
) -> tuple[RolloutFnTrainOutput, list[Group]]:
    """Generate until rollout_batch_size groups are accepted.

    Consumes prompts of `data_source`, over_sampling_batch_size at a time, whenever fewer groups than needed are
    accepted or in flight. Waits for the next finished group; each one unblocks the filter and possibly the next
    request. At the end engines are told to abort what still runs.

    Returns:
        (output with the groups ordered by sample index, groups to give back to the data source).

    Raises:
        RuntimeError: the filter drops (or engines abort) group after group.
    """
    set_current_rollout_id(rollout_id)
    state = GenerateState(args)
    state.reset()
    collector = _Collector(args)
    try:
        with progress_bar(args.rollout_batch_size, f"rollout {rollout_id}") as bar:
            while len(collector.accepted) < args.rollout_batch_size:
                while state.remaining_batch_size < args.rollout_batch_size:
                    state.submit_generate_tasks(data_source.get_samples(args.over_sampling_batch_size))
                bar.update(collector.take(state, await state.finished.get()))
        while not state.finished.empty():  # finished in the same instant
            collector.take(state, state.finished.get_nowait())
        unused = collector.unused + await abort(args, rollout_id)
    except BaseException:
        await _cancel_all(state)
        raise
    output = _finish(args, collector, data_source)
    return output, sorted(unused, key=_first_index)


class _Collector:
    """Sorts finished groups into accepted, dropped and unused."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.filter = load_function(args.dynamic_sampling_filter_path) if args.dynamic_sampling_filter_path else None
        self.metrics = MetricGatherer()
        self.accepted: list[Group] = []
        self.dropped: list[Group] = []
        self.unused: list[Group] = []
        self.num_aborted_by_engine = 0

    def take(self, state: GenerateState, task: asyncio.Task[Group]) -> int:
        """Sort one finished task; returns 1 when its group was accepted, else 0. The task's error is raised."""
        untouched = state.pendings.pop(task)
        group = task.result()
        if len(self.accepted) >= self.args.rollout_batch_size:
            self.unused.append(untouched)
            return 0
        if any(sample.status is Sample.Status.ABORTED for sample in group):
            self._count_aborted(group)
            state.remaining_batch_size -= 1
            self.unused.append(untouched)
            return 0
        verdict = call_dynamic_filter(self.filter, self.args, group)
        target = self.args.rollout_batch_size
        if should_drop_dynamic_filter_output(
            verdict, remaining_batch_size=state.remaining_batch_size, target_data_size=target
        ):
            self._drop(group, verdict.reason)
            state.remaining_batch_size -= 1
            return 0
        self.accepted.append(group)
        return 1

    def _drop(self, group: Group, reason: str | None) -> None:
        self.dropped.append(group)
        self.metrics.on_dynamic_filter_drop(reason)
        limit = _MAX_DROPPED_PER_PROMPT * self.args.rollout_batch_size
        if self.metrics.num_dropped >= limit:
            raise RuntimeError(
                f"--dynamic-sampling-filter-path {self.args.dynamic_sampling_filter_path} dropped {limit} groups, "
                f"{len(self.accepted)} of {self.args.rollout_batch_size} were accepted: {self.metrics.collect()}"
            )

    def _count_aborted(self, group: Group) -> None:
        self.num_aborted_by_engine += 1
        logger.warning("an engine aborted a sample of prompt group %s; it is generated again", group[0].group_index)
        if self.num_aborted_by_engine > max(10, self.args.rollout_batch_size):
            raise RuntimeError(
                f"engines aborted {self.num_aborted_by_engine} groups although this rollout was not ending; "
                "see the engine logs (memory, timeouts), or what the custom generate function sets as status"
            )


async def abort(args: Namespace, rollout_id: int) -> list[Group]:
    """End what is in flight: tell every engine to abort until no task is left.

    Tasks that do not end within a minute are cancelled, which closes their connections.

    Returns:
        The prompts of the groups that were in flight, fresh, to be given back to the data source.
    """
    state = GenerateState(args)
    state.aborted = True
    returned = list(state.pendings.values())
    deadline = time.monotonic() + _ABORT_DEADLINE_S
    while state.pendings:
        await _abort_engines(args)
        # Asked again every second: a request may have been on its way, a multi-turn function may start another turn.
        done, _ = await asyncio.wait(state.pendings, timeout=_ABORT_EVERY_S)
        for task in done:
            del state.pendings[task]
            if not task.cancelled() and task.exception():
                logger.warning("a group that was being aborted in rollout %d failed: %r", rollout_id, task.exception())
        if state.pendings and time.monotonic() > deadline:
            logger.warning(
                "cancelling %d groups that ignored the abort of rollout %d", len(state.pendings), rollout_id
            )
            await _cancel_all(state)
            await _abort_engines(args)
    return returned


async def _abort_engines(args: Namespace) -> None:
    workers = await server_control.list_workers(router_url(args))
    await asyncio.gather(*(server_control.abort_all(worker) for worker in workers))


async def _cancel_all(state: GenerateState) -> None:
    tasks = list(state.pendings)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    state.pendings.clear()


def _finish(args: Namespace, collector: _Collector, data_source: Any) -> RolloutFnTrainOutput:
    """Order the groups and run the two hooks at the end of a rollout."""
    data = sorted(collector.accepted, key=_first_index)
    if args.rollout_sample_filter_path:
        load_function(args.rollout_sample_filter_path)(args, data)
    if args.rollout_all_samples_process_path:
        every = sorted(data + collector.dropped, key=_first_index)
        load_function(args.rollout_all_samples_process_path)(args, every, data_source)
    return RolloutFnTrainOutput(samples=data, metrics=collector.metrics.collect())


def _first_index(group: Group) -> int:
    return -1 if group[0].index is None else group[0].index
