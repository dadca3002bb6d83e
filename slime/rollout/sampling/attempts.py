"""A sample's attempts: begun anew, and with --on-untrusted-reward retry made again while its reward is not trusted."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from slime.algorithms.estimators import GREEDY_REWARD
from slime.config.args import Args
from slime.rollout.sampling.images import of_prompt
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
START = "start_rollout_id"
Completed = Sample | list[Sample]
Status = Sample.Status
FINISHED = (Status.COMPLETED, Status.TRUNCATED)
_retries = {"untrusted": 0}


def fresh_copy(sample: Sample) -> Sample:
    """The sample's prompt, place and metadata, with nothing generated."""
    return Sample(
        group_index=sample.group_index,
        index=sample.index,
        prompt=sample.prompt,
        multimodal_inputs=of_prompt(sample),
        apply_chat_template_kwargs=sample.apply_chat_template_kwargs,
        label=sample.label,
        metadata=dict(sample.metadata),
        generate_function_path=sample.generate_function_path,
        custom_rm_path=sample.custom_rm_path,
        train_metadata=sample.train_metadata,
    )


def restarted(sample: Sample) -> Sample:
    """The sample with nothing generated, and without what a rollout noted about an earlier attempt."""
    fresh = fresh_copy(sample)
    for key in (START, GREEDY_REWARD):
        fresh.metadata.pop(key, None)
    return fresh


async def until_trusted(args: Args, sample: Sample, attempt: Callable[[Sample], Awaitable[Completed]]) -> Completed:
    """Make a sample, and again from its prompt while its reward is not trusted (--on-untrusted-reward retry).

    Args:
        args: `max_group_retries` bounds the further attempts.
        sample: as it was handed out.
        attempt: generates and scores a sample.
    """
    tries, untouched = args.max_group_retries, sample.snapshot()
    completed = await attempt(sample)
    while tries and (reason := _untrusted_end(completed)):
        tries -= 1
        _retries["untrusted"] += 1
        logger.warning("sample %s ended with %s, its reward is untrusted: made again", sample.index, reason)
        is_new = untouched.status is Status.PENDING and not untouched.response_length
        again = untouched.snapshot() if is_new else restarted(untouched)
        again.session_id = untouched.session_id
        completed = await attempt(again)
    return completed


def take_untrusted_retries() -> int:
    """Samples that were made again since the last call because a reward was not trusted."""
    count, _retries["untrusted"] = _retries["untrusted"], 0
    return count


def _untrusted_end(completed: Completed) -> str | None:
    """How an execution ended whose reward is not trusted; None where it is, or where the rollout ended first."""
    samples = completed if isinstance(completed, list) else [completed]
    if any(sample.status is Status.ABORTED for sample in samples):
        return None
    return next((sample.end_reason or "no reason" for sample in samples if not sample.reward_is_trusted), None)
