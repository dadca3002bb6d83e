"""The default rollout function: groups generated concurrently until enough were accepted, the rest aborted.

Departs from upstream in five points:
1. Prompts of aborted and surplus groups go back to the data source, so that no prompt is lost; with --partial-rollout
   they take along what was generated for them.
2. A rollout that ends waits for no reward: with --partial-rollout finished responses are scored in a later rollout.
3. A group that an engine aborted by itself is generated again instead of being trained on.
4. Endless filtering ends with an error that names the filter (--max-dynamic-sampling-rounds).
5. A sample whose generation or scoring fails is named, and --on-sample-error says what becomes of its group.

What one sample goes through is in slime.rollout.sampling.generation, what becomes of a finished group in
slime.rollout.collector, evaluation in slime.rollout.eval.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from typing import Any

from slime.backends.sglang_utils import server_control
from slime.config.args import Args
from slime.processes.progress import progress_bar
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.collector import Collector
from slime.rollout.eval import eval_rollout, eval_rollout_single_dataset
from slime.rollout.hooks.errors import blame_hook, hook_name
from slime.rollout.hooks.returns import draw_groups, return_groups, warn_if_ignored
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.rollout.sampling.engine_request import get_model_url, router_url
from slime.rollout.sampling.generation import (
    GenerateState,
    generate,
    generate_and_rm,
    generate_and_rm_group,
)
from slime.rollout.sampling.scoring import restarted
from slime.rollout.sampling.weight_versions import WeightClock, is_too_old
from slime.utils import async_utils
from slime.utils.errors import HttpError
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
ABORT_DEADLINE_S = 60.0


def generate_rollout(
    args: Args, rollout_id: int, data_source: Any, evaluation: bool = False
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
        return_groups(args, data_source, unused)
    return output


async def generate_rollout_async(
    args: Args, rollout_id: int, data_source: Any
) -> tuple[RolloutFnTrainOutput, list[Group]]:
    """Generate until rollout_batch_size groups are accepted.

    Consumes prompts of `data_source`, over_sampling_batch_size at a time, whenever fewer groups than needed are
    accepted or in flight. Waits for the next finished group; each one unblocks the filter and possibly the next
    request. At the end engines are told to abort what still runs.

    Returns:
        (output with the groups ordered by sample index, groups to give back to the data source).

    Raises:
        SampleError: generating or scoring a sample failed (--on-sample-error fail).
        RuntimeError: the filter drops, engines abort, or samples fail, group after group.
    """
    set_current_rollout_id(rollout_id)
    state = GenerateState(args)
    state.reset()
    collector = Collector(args, rollout_id)
    async with AsyncExitStack() as on_error:
        on_error.push_async_callback(_cancel_all, state)
        with progress_bar(collector.batch_size, f"rollout {rollout_id}") as bar:
            while len(collector.accepted) < collector.batch_size:
                while state.remaining_batch_size < collector.batch_size:
                    groups = draw_groups(args, data_source, args.over_sampling_batch_size)
                    state.submit_generate_tasks(restart_stale(args, rollout_id, groups))
                bar.update(collector.take(state, await state.finished.get()))
        while not state.finished.empty():  # finished in the same instant
            collector.take(state, state.finished.get_nowait())
        unused = collector.unused + await _abort(args, rollout_id, collector)
        on_error.pop_all()
    output = finish_rollout(args, collector, data_source)
    return output, sorted(unused, key=_first_index)


async def abort(args: Args, rollout_id: int) -> list[Group]:
    """End what is in flight: tell every engine to abort until no task is left.

    Tasks that do not end within a minute are cancelled, which closes their connections.

    Returns:
        The groups that were in flight, to be given back to the data source: as they were when they were started, or
        with --partial-rollout with what they have, marked with metadata["start_rollout_id"].
    """
    return await _abort(args, rollout_id, Collector(args, rollout_id))


async def _abort(args: Args, rollout_id: int, collector: Collector) -> list[Group]:
    state = GenerateState(args)
    state.aborted = True  # from here on no scoring begins
    returned = []
    deadline = time.monotonic() + ABORT_DEADLINE_S
    for scoring in state.scorings:
        scoring.cancel()
    while state.pendings:
        await _abort_engines(args)
        # Asked again every second: a request may have been on its way, a multi-turn function may start another turn.
        done, _ = await asyncio.wait(state.pendings, timeout=_ABORT_EVERY_S)
        for task in done:
            returned.append(collector.give_back(_result_of(task, rollout_id), state.pendings.pop(task)))
        if state.pendings and time.monotonic() > deadline:
            logger.warning(
                "cancelling %d groups that ignored the abort of rollout %d", len(state.pendings), rollout_id
            )
            returned += state.pendings.values()
            await _cancel_all(state)
            await _abort_engines(args)
    state.aborted = False  # a background evaluation may go on
    return returned


def _result_of(task: asyncio.Task[Group], rollout_id: int) -> Group | None:
    """The group of a task that is done; None where it failed, which does no harm to a rollout that is complete."""
    if task.cancelled():
        return None
    if error := task.exception():
        logger.warning("a group that was being aborted in rollout %d failed: %s", rollout_id, error)
        return None
    return task.result()


async def _abort_engines(args: Args) -> None:
    """Tell every engine once. One that died or hangs costs no rollout: what it had in flight ends by itself."""
    workers = await server_control.list_workers(router_url(args))
    results = await asyncio.gather(*(server_control.abort_all(worker) for worker in workers), return_exceptions=True)
    for error in filter(None, results):
        if not isinstance(error, HttpError):
            raise error
        logger.warning("an engine could not be told to abort: %s", error)


async def _cancel_all(state: GenerateState) -> None:
    await async_utils.cancel_all(state.pendings)
    state.pendings.clear()


def finish_rollout(args: Args, collector: Collector, data_source: Any) -> RolloutFnTrainOutput:
    """Order the groups and run the two hooks at the end of a rollout."""
    data = sorted(collector.accepted, key=_first_index)
    if path := args.rollout_sample_filter_path:
        with blame_hook(f"--rollout-sample-filter-path {hook_name(path)}"):
            returned = load_function(path)(args, data)
        warn_if_ignored(path, returned)
    if path := args.rollout_all_samples_process_path:
        every = sorted(data + collector.dropped, key=_first_index)
        with blame_hook(f"--rollout-all-samples-process-path {hook_name(path)}"):
            load_function(path)(args, every, data_source)
    metrics = collector.metrics()
    if observe := getattr(data_source, "observe", None):
        with blame_hook(f"--data-source-path {hook_name(args.data_source_path)}: observe"):
            metrics |= observe(data + collector.dropped) or {}
    return RolloutFnTrainOutput(samples=data, metrics=metrics)


def restart_stale(args: Args, rollout_id: int, groups: list[Group]) -> list[Group]:
    """The groups; those whose tokens would be older than --max-weight-staleness when trained begin anew."""
    at, bound = WeightClock().trained_at(rollout_id), args.max_weight_staleness
    return [[restarted(sample) for sample in group] if is_too_old(group, at, bound) else group for group in groups]


def _first_index(group: Group) -> int:
    return -1 if group[0].index is None else group[0].index
