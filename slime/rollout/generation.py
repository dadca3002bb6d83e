"""From one prompt to scored samples: one engine call (or a custom generate function), sample hooks, reward.

Shared by the training rollout (slime.rollout.sglang_rollout) and by evaluation (slime.rollout.eval), which decide what
is generated and when; this module does not. User code imports these names from slime.rollout.sglang_rollout.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import uuid
from argparse import Namespace
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from slime.rollout.base_types import flatten
from slime.rollout.model_urls import router_url
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.utils.http_utils import get_rollout_num_engines, init_http_client, post
from slime.utils.misc import SingletonMeta, load_function, stable_hash
from slime.utils.processing_utils import encode_text, load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
T = TypeVar("T")
Group = list[Sample]
Status = Sample.Status
_FINISHED = (Status.COMPLETED, Status.TRUNCATED)


class GenerateState(metaclass=SingletonMeta):
    """What the rollouts of one process share: tokenizer, sampling parameters, the semaphore and the tasks in flight.

    `remaining_batch_size` counts the groups that are accepted or in flight. `pendings` holds each task in flight with
    its prompt as it was, `finished` receives the task when it is done. `aborted` tells generate functions of several
    turns to stop.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency * get_rollout_num_engines(args))
        self.sampling_params: dict[str, Any] = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "min_new_tokens": args.rollout_min_new_tokens,
            "stop": args.rollout_stop,
            "stop_token_ids": args.rollout_stop_token_ids,
            "ignore_eos": args.rollout_ignore_eos,
            "skip_special_tokens": args.rollout_skip_special_tokens,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }
        self.encode = functools.lru_cache(maxsize=4096)(self._encode)
        init_http_client(args)
        self.reset()

    def _encode(self, prompt: str) -> tuple[int, ...]:
        return tuple(encode_text(self.tokenizer, prompt))

    def reset(self) -> None:
        """Forget the last rollout."""
        self.aborted = False
        self.remaining_batch_size = 0
        self.pendings: dict[asyncio.Task[Group], Group] = {}
        self.finished: asyncio.Queue[asyncio.Task[Group]] = asyncio.Queue()

    def submit_generate_tasks(self, groups: list[Group]) -> None:
        """Start one task per group; each prompt is kept as it was, to be returned if its group is not used."""
        for group in groups:
            untouched = [fresh_copy(sample) for sample in group]
            task = asyncio.create_task(generate_and_rm_group(self.args, group, dict(self.sampling_params)))
            self.pendings[task] = untouched
            task.add_done_callback(self.finished.put_nowait)
        self.remaining_batch_size += len(groups)


def fresh_copy(sample: Sample) -> Sample:
    """The sample's prompt, place and metadata, with nothing generated."""
    return Sample(
        group_index=sample.group_index,
        index=sample.index,
        prompt=sample.prompt,
        apply_chat_template_kwargs=sample.apply_chat_template_kwargs,
        label=sample.label,
        metadata=dict(sample.metadata),
        generate_function_path=sample.generate_function_path,
        custom_rm_path=sample.custom_rm_path,
        train_metadata=sample.train_metadata,
    )


def sampling_seed(*parts: int | str) -> int:
    """A request's 31-bit seed, from what identifies it: the same in every run."""
    return stable_hash("sampling", *parts)


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """The default generate function: one call to the router's /generate, answer appended to the sample.

    Args:
        args: router address, `rollout_max_context_len`, `eval_max_context_len`.
        sample: its prompt is text; tokens that it already has are continued.
        sampling_params: SGLang's, with `max_new_tokens`; it and `min_new_tokens` count what the response already has.
        evaluation: the limit of the context is that of evaluations.

    Raises:
        HttpError: the engine refused the request or could not be reached.
        ValueError: the prompt is a message list, or no response length is set.
    """
    state = GenerateState(args)
    if not sample.tokens:
        if not isinstance(sample.prompt, str):
            raise ValueError("the prompt is a message list; --apply-chat-template turns it into text")
        sample.tokens = list(state.encode(sample.prompt))
    if sampling_params["max_new_tokens"] is None:
        raise ValueError("--rollout-max-response-len is not set; the default generate function needs it")
    budget = sampling_params["max_new_tokens"] - sample.response_length
    context = args.eval_max_context_len if evaluation else args.rollout_max_context_len
    if context is not None:
        budget = min(budget, context - len(sample.tokens))
    if budget <= 0:
        sample.status = Status.TRUNCATED
        return sample
    params = {**sampling_params, "max_new_tokens": budget}
    if params.get("min_new_tokens"):
        params["min_new_tokens"] = min(max(params["min_new_tokens"] - sample.response_length, 0), budget)
    payload = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
    output = await post(f"{router_url(args)}/generate", payload)
    append_engine_output(args, sample, output)
    return sample


def append_engine_output(args: Namespace, sample: Sample, output: Any) -> None:
    """Append what /generate answered: tokens, log-probs, text, and how it ended.

    Raises:
        RuntimeError: the answer has no log-probs, or is none of /generate.
    """
    if not isinstance(output, dict) or "meta_info" not in output:
        raise RuntimeError(f"/generate answered {str(output)[:500]!r}, which has no meta_info")
    meta_info = output["meta_info"]
    pairs = meta_info.get("output_token_logprobs")
    if pairs is None and meta_info.get("completion_tokens"):
        raise RuntimeError("/generate returned no output_token_logprobs although return_logprob was asked for")
    sample.append_response_tokens(
        args,
        tokens=[pair[1] for pair in pairs or []],
        log_probs=[pair[0] for pair in pairs or []],
        meta_info=meta_info,
        text=output.get("text"),
    )


async def generate_and_rm(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Complete one sample, run the sample hooks, score it.

    A sample that is already finished is only scored. With --group-rm (training) scoring is left to the group. Samples
    that were aborted or already have a reward are not scored.

    Returns:
        The sample, or the list that a custom generate function made of it (they share a rollout_id).
    """
    state = GenerateState(args)
    if sample.status in _FINISHED:
        completed: Sample | list[Sample] = sample
    else:
        async with state.semaphore:
            if state.aborted and not evaluation:
                sample.status = Status.ABORTED
                return sample
            completed = await _call_generate(args, sample, sampling_params, evaluation)
    completed = await apply_rollout_sample_hooks(args, completed, evaluation=evaluation)
    samples = flatten(completed)
    if isinstance(completed, list):
        _share_rollout_id(sample, samples)
    if not args.group_rm or evaluation:
        await _score_each(args, samples)
    return samples if isinstance(completed, list) else completed


async def _call_generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Sample | list[Sample]:
    path = sample.generate_function_path or args.custom_generate_function_path
    if not path:
        return await generate(args, sample, sampling_params, evaluation)
    fn = load_function(path)
    extra = {"evaluation": evaluation} if _has_parameter(fn, "evaluation") else {}
    completed: Sample | list[Sample] = await fn(args, sample, sampling_params, **extra)
    if not completed or not isinstance(completed, Sample | list):
        raise TypeError(f"--custom-generate-function-path {path} returned {completed!r}; expected a Sample or a list")
    return completed


@functools.cache
def _has_parameter(fn: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(fn).parameters


def _share_rollout_id(origin: Sample, siblings: list[Sample]) -> None:
    """Make fan-out siblings one execution, members of the origin's group."""
    given = {sibling.rollout_id for sibling in siblings if sibling.rollout_id is not None}
    if len(given) > 1:
        raise ValueError(f"a custom generate function returned siblings with different rollout_ids: {sorted(given)}")
    rollout_id = given.pop() if given else origin.index
    for sibling in siblings:
        sibling.rollout_id = rollout_id
        if sibling.group_index is None:
            sibling.group_index = origin.group_index
        if sibling.index is None:
            sibling.index = origin.index


async def _score_each(args: Namespace, samples: list[Sample]) -> None:
    unscored = [s for s in samples if s.reward is None and s.status is not Status.ABORTED]
    rewards = await gather_or_cancel(async_rm(args, sample) for sample in unscored)
    for sample, reward in zip(unscored, rewards, strict=True):
        sample.reward = reward


async def generate_and_rm_group(
    args: Namespace, group: Group, sampling_params: dict[str, Any], evaluation: bool = False
) -> Group:
    """Complete and score the samples of one prompt; fan-out lists are flattened into the group.

    With deterministic inference each sample gets a sampling seed of its own. With --group-rm the reward function sees
    the whole group at once, unless a sample was aborted.
    """
    state = GenerateState(args)
    if state.aborted:
        for sample in group:
            sample.status = Status.ABORTED
        return group
    calls = []
    for sample in group:
        sample.session_id = sample.session_id or uuid.uuid4().hex
        params = dict(sampling_params)
        if args.sglang_enable_deterministic_inference:
            params["sampling_seed"] = sampling_seed(args.rollout_seed, str(sample.index))
        calls.append(generate_and_rm(args, sample, params, evaluation))
    completed = flatten(await gather_or_cancel(calls))
    if args.group_rm and not evaluation and not any(s.status is Status.ABORTED for s in completed):
        await _score_group(args, completed)
    return completed


async def _score_group(args: Namespace, group: Group) -> None:
    if all(sample.reward is not None for sample in group):
        return
    rewards = await batched_async_rm(args, group)
    if len(rewards) != len(group):
        raise ValueError(f"--group-rm: the reward function returned {len(rewards)} rewards for {len(group)} samples")
    for sample, reward in zip(group, rewards, strict=True):
        if sample.reward is None:
            sample.reward = reward


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T] | Awaitable[T]]) -> list[T]:
    """Results of all, in order; when one fails the others are cancelled and its error is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
