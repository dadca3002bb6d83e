"""Attempts at a sample, and its score: begun anew, scored, and made again while its reward is not trusted.

Which reward function scores it, slime.rollout.rm_hub decides. Fan-out siblings are one execution. A sample whose
reward is not trusted is not scored (--on-untrusted-reward, of which retry makes another attempt), and one that a
reward service failed to score becomes such a sample.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from slime.algorithms.estimators import GREEDY_REWARD
from slime.config.args import Args
from slime.observability.trace_utils import span_if_traced
from slime.rollout.hooks.errors import hook_name
from slime.rollout.hooks.process_rewards import process_problem, take_process_rewards
from slime.rollout.hooks.sample_errors import (
    SampleValueError,
    blame,
    check_reward,
    describe,
    generate_name,
    reward_name,
)
from slime.rollout.rm_hub import RewardError, async_rm, batched_async_rm
from slime.rollout.sampling.images import of_prompt
from slime.utils.async_utils import gather_or_cancel
from slime.utils.misc import hook_args, load_function
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


async def score_each(args: Args, samples: list[Sample], *, evaluation: bool) -> None:
    """Score every sample that has no reward yet, was not aborted, and whose reward can be trusted.

    Raises:
        SampleError: the reward function failed, or returned no finite number.
    """
    _check_given(args, samples, evaluation=evaluation)
    unscored = _unscored(args, samples)
    rewards = await gather_or_cancel(_score(args, sample, evaluation) for sample in unscored)
    for sample, reward in zip(unscored, rewards, strict=True):
        sample.reward = reward
    if not evaluation:
        await _score_process(args, samples)


async def _score_process(args: Args, samples: list[Sample]) -> None:
    """Ask --process-reward-path for the rewards of the tokens or turns of finished samples that have none yet."""
    if path := args.process_reward_path:
        name, hook = f"--process-reward-path {hook_name(path)}", load_function(path)
        await gather_or_cancel(_score_steps(args, hook, name, sample) for sample in _unrated(args, samples))


def _unrated(args: Args, samples: list[Sample]) -> list[Sample]:
    finished = [s for s in samples if s.status is not Sample.Status.ABORTED and s.counts(args) and not s.remove_sample]
    return [sample for sample in finished if sample.token_rewards is None and sample.turn_rewards is None]


async def _score_steps(args: Args, hook: Callable[..., Any], name: str, sample: Sample) -> None:
    with blame(name, sample), span_if_traced(sample, "process_reward"):
        try:
            given = hook(hook_args(args), sample)
            take_process_rewards(sample, await given if inspect.isawaitable(given) else given)
        except RewardError as error:
            _distrust(args, [sample], error)
    if problem := process_problem(args, sample):
        raise SampleValueError(f"{name} returned {describe(sample)} with {problem}")


async def _score(args: Args, sample: Sample, evaluation: bool) -> Any:
    name = reward_name(args, sample)
    with (
        blame(name, sample, about_label=_why_no_label(args, [sample], evaluation=evaluation)),
        span_if_traced(sample, "reward"),
    ):
        try:
            reward = await async_rm(args, sample)
        except RewardError as error:
            _distrust(args, [sample], error)
            return None
    return _checked(args, name, sample, reward, evaluation=evaluation)


def _checked(args: Args, name: str, sample: Sample, reward: Any, *, evaluation: bool) -> Any:
    """The reward; a function that has just said that it is not to be trusted may leave it out."""
    if reward is not None or sample.counts(args):
        check_reward(args, name, sample, reward, evaluation=evaluation)
    return reward


def _distrust(args: Args, samples: list[Sample], error: RewardError) -> None:
    """Note on samples that a service failed to score them.

    Raises:
        RewardError: it refused them, so something is wrong with the request; or --on-untrusted-reward keep.
    """
    if args.on_untrusted_reward == "keep" or 400 <= (error.status or 0) < 500:
        raise error
    logger.warning("--on-untrusted-reward %s: %s", args.on_untrusted_reward, error)
    for sample in samples:
        sample.end_reason, sample.reward_is_trusted = "grader_error", False


async def score_fan_out(args: Args, siblings: list[Sample], *, evaluation: bool) -> None:
    """Score the samples that a generate function made of one: as a list, with one call of --custom-rm-path.

    Only the samples that `score_each` would score are in the list. A sample with a `custom_rm_path` of its own is
    scored by that, and without --custom-rm-path each sample is scored by itself.

    Raises:
        SampleError: the reward function failed, or returned another number of rewards than samples.
    """
    if args.custom_rm_path:
        together = [sample for sample in _unscored(args, siblings) if not sample.custom_rm_path]
        await _score_together(args, together, "the list that a generate function returned", evaluation=evaluation)
    await score_each(args, siblings, evaluation=evaluation)


async def score_group(args: Args, group: list[Sample]) -> None:
    """Score a group with one call that sees all of it (--group-rm); rewards that are there are kept.

    Samples whose reward is not trusted are left out of it.

    Raises:
        SampleError: the reward function failed, or returned another number of rewards than samples.
    """
    _check_given(args, group, evaluation=False)
    together = [sample for sample in group if sample.counts(args)]
    if args.custom_rm_path is None:  # graders by name see one sample at a time, so one that fails costs one reward
        await score_each(args, together, evaluation=False)
        return
    if any(sample.reward is None for sample in together):
        await _score_together(args, together, "--group-rm", evaluation=False)
    await _score_process(args, together)


async def _score_together(args: Args, samples: list[Sample], why: str, *, evaluation: bool) -> None:
    if not samples:
        return
    name = reward_name(args, samples[0])
    with (
        blame(
            name if why == "--group-rm" else f"{name} ({why})",
            samples[0],
            about_label=_why_no_label(args, samples, evaluation=evaluation),
        ),
        span_if_traced(samples, "reward"),
    ):
        try:
            rewards = await batched_async_rm(args, samples)
        except RewardError as error:
            _distrust(args, samples, error)
            return
    if len(rewards) != len(samples):
        raise SampleValueError(
            f"{name} returned {len(rewards)} rewards for the {len(samples)} samples of {describe(samples[0])} ({why})"
        )
    for sample, reward in zip(samples, rewards, strict=True):
        if sample.reward is None:
            sample.reward = _checked(args, name, sample, reward, evaluation=evaluation)


def _unscored(args: Args, samples: list[Sample]) -> list[Sample]:
    return [s for s in samples if s.reward is None and s.status is not Sample.Status.ABORTED and s.counts(args)]


def _check_given(args: Args, samples: list[Sample], *, evaluation: bool) -> None:
    """Check the rewards that samples came with: such a sample is not scored again."""
    by_hook = " or a --rollout-sample-hook-path" if args.rollout_sample_hook_path else ""
    for sample in samples:
        if sample.reward is not None and sample.status is not Sample.Status.ABORTED:
            check_reward(args, generate_name(args, sample) + by_hook, sample, sample.reward, evaluation=evaluation)


def _why_no_label(args: Args, samples: list[Sample], *, evaluation: bool) -> str:
    """Why samples have no label, where none has one; a reward that fails may have read it."""
    if any(sample.label is not None for sample in samples):
        return ""
    if evaluation:
        return "the sample has no label, whose field --eval-label-key or label_key of the data set names"
    return "the sample has no label: --label-key was not given" if args.label_key is None else ""


def share_rollout_id(origin: Sample, siblings: list[Sample]) -> None:
    """Make fan-out siblings one execution, members of the origin's group."""
    given = {sibling.rollout_id for sibling in siblings if sibling.rollout_id is not None}
    if len(given) > 1:
        raise SampleValueError(f"the siblings made of {describe(origin)} have different rollout_ids: {sorted(given)}")
    rollout_id = given.pop() if given else origin.index
    for sibling in siblings:
        sibling.rollout_id = rollout_id
        if sibling.group_index is None:
            sibling.group_index = origin.group_index
        if sibling.index is None:
            sibling.index = origin.index
