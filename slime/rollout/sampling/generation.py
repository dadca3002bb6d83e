"""From one prompt to scored samples: one engine call (or a custom generate function), sample hooks, reward.

slime.rollout.sglang_rollout, from which user code imports these names, and eval decide what is generated when.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from slime.algorithms.estimators import ESTIMATORS, GREEDY_REWARD
from slime.config.args import Args
from slime.config.prompt_sources import params_of
from slime.observability.trace_utils import (
    bind_trace,
    build_sglang_meta_trace_attrs,
    is_traced,
    note_times,
    span_if_traced,
    trace_next_attempt,
)
from slime.processes.progress import went_on
from slime.rollout.base_types import flatten
from slime.rollout.hooks.process_rewards import turns_as_tokens
from slime.rollout.hooks.sample_errors import (
    blame,
    check_completed,
    check_distinct,
    check_sample,
    describe,
    generate_name,
    hook_name,
)
from slime.rollout.hooks.signatures import is_batch_generate
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.rollout.sampling import engine_request, scoring
from slime.rollout.sampling.engine_request import append_engine_output, router_url
from slime.rollout.sampling.images import MediaTokens, find_images, has_images, set_prompt
from slime.rollout.sampling.scoring import FINISHED, fresh_copy
from slime.rollout.sampling.weight_versions import WeightClock, note_begin
from slime.utils.async_utils import gather_or_cancel, is_cancellation
from slime.utils.http_utils import get_rollout_num_engines, init_http_client, post
from slime.utils.misc import SingletonMeta, load_function, stable_hash
from slime.utils.processing_utils import encode_text, load_processor, load_tokenizer
from slime.utils.types import Sample

__all__ = [
    "GenerateState",
    "append_engine_output",
    "fresh_copy",
    "gather_or_cancel",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "is_unfinished",
    "sampling_seed",
]
logger = logging.getLogger(__name__)
Group = list[Sample]
Status = Sample.Status


class GenerateState(metaclass=SingletonMeta):
    """What the rollouts of one process share: tokenizer, sampling parameters, the semaphore and the tasks in flight.

    `remaining_batch_size` counts the groups that are accepted or in flight. `pendings` holds each task in flight with
    its prompt as it was, `finished` receives the task when it is done. `aborted` tells generate functions of several
    turns to stop. `scorings` holds what waits for rewards of a training rollout.
    """

    def __init__(self, args: Args) -> None:
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
        self.group_sampling_seeds: list[int] | None = None
        if args.sglang_enable_deterministic_inference:
            self.group_sampling_seeds = [args.rollout_seed + j for j in range(args.n_samples_per_prompt)]
        self._dp_counts = [0] * (args.sglang_dp_size or 1)
        init_http_client(args)
        self.reset()

    @functools.cached_property
    def processor(self) -> Any:
        """The checkpoint's processor, loaded at first use; None when it has none."""
        return load_processor(self.args.hf_checkpoint, trust_remote_code=self.args.trust_remote_code)

    @functools.cached_property
    def media(self) -> MediaTokens:
        """The processor's tokens that are not words."""
        return MediaTokens.of(self.processor)

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """The data-parallel rank of an engine that has the fewest calls in flight, counted while inside."""
        rank = self._dp_counts.index(min(self._dp_counts))
        self._dp_counts[rank] += 1
        try:
            yield rank
        finally:
            self._dp_counts[rank] -= 1

    def _encode(self, prompt: str) -> tuple[int, ...]:
        return tuple(encode_text(self.tokenizer, prompt))

    def reset(self) -> None:
        """Forget the last rollout."""
        self.aborted = False
        self.remaining_batch_size = 0
        self.pendings: dict[asyncio.Task[Group], Group] = {}
        self.finished: asyncio.Queue[asyncio.Task[Group]] = asyncio.Queue()
        self.scorings: set[asyncio.Task[None]] = set()

    async def score_until_aborted(self, rewards: Coroutine[Any, Any, None]) -> None:
        """Wait for rewards; when the rollout ends first, return without: they are asked for again in a later one."""
        if self.aborted:
            rewards.close()
            return
        task = asyncio.create_task(rewards)
        self.scorings.add(task)
        try:
            await task
        except asyncio.CancelledError as error:
            if is_cancellation(error) or not self.aborted:
                raise
        finally:
            self.scorings.discard(task)

    def submit_generate_tasks(self, samples: list[Group]) -> None:
        """Start one task per group; each group is kept as it was, to be returned if its result is not used."""
        for group in samples:
            untouched, params = [one.snapshot() for one in group], params_of(self.args, self.sampling_params, group)
            task = asyncio.create_task(generate_and_rm_group(self.args, group, params))
            self.pendings[task] = untouched
            task.add_done_callback(self.finished.put_nowait)
        self.remaining_batch_size += len(samples)


def sampling_seed(*parts: int | str) -> int:
    """A request's 31-bit seed, from what identifies it: the same in every run."""
    return stable_hash("sampling", *parts)


async def generate(args: Args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """The default generate function: one call to the router's /generate, answer appended to the sample.

    With --rollout-fire-temperature the first token of a new response is a call of its own, at that temperature. It is
    masked: it was not the policy that chose it, so the policy must not be trained on it.

    Args:
        args: router address, `rollout_max_context_len`, `eval_max_context_len`, `rollout_fire_temperature`.
        sample: its prompt is text; tokens that it already has are continued.
        sampling_params: SGLang's, with `max_new_tokens`; it and `min_new_tokens` count what the response already has.
        evaluation: the limit of the context is that of evaluations.

    Raises:
        HttpError: the engine refused the request or could not be reached.
        ValueError: the prompt is a message list, or no response length is set.
    """
    state = GenerateState(args)
    if not sample.tokens:
        await tokenize_prompt(state, sample)
    limit = args.eval_max_context_len if evaluation else args.rollout_max_context_len
    is_new = sample.response_length == 0
    params = engine_request.call_budget(sample, sampling_params, max_context_len=limit)
    is_fire = args.rollout_fire_temperature is not None and is_new and not evaluation
    if params is not None and is_fire and params.get("temperature") != 0:
        if not await _generate_hot_token(state, sample, params):
            return sample
        params, is_new = engine_request.call_budget(sample, sampling_params, max_context_len=limit), False
    if params is None:
        sample.status = Status.TRUNCATED
        return sample
    await _call_engine(args, sample, params)
    if not is_new:
        engine_request.set_response_text(state.tokenizer, sample, sampling_params)
    return sample


async def tokenize_prompt(state: GenerateState, sample: Sample) -> None:
    """Set the tokens of a sample that has none to those of its prompt."""
    if not isinstance(sample.prompt, str):
        raise ValueError("the prompt is a message list; --apply-chat-template turns it into text")
    if has_images(sample):
        await set_prompt(sample, state, sample.prompt)
    else:
        sample.tokens = list(state.encode(sample.prompt))


async def _call_engine(args: Args, sample: Sample, params: dict[str, Any], *, trainable: bool = True) -> None:
    url = f"{router_url(args)}/generate"
    with span_if_traced(sample, "engine call") as span:
        state = GenerateState(args)
        payload = engine_request.engine_payload(sample, params, state)
        output = await post(url, payload, headers=engine_request.engine_headers(args, sample))
        try:
            output = engine_request.settled(output, payload["sampling_params"], state.tokenizer)
            append_engine_output(args, sample, output, trainable=trainable)
        except RuntimeError as error:
            raise RuntimeError(f"{url}: {error}") from None
        if span.is_recorded:
            span.update(build_sglang_meta_trace_attrs(output["meta_info"]))


async def _generate_hot_token(state: GenerateState, sample: Sample, params: dict[str, Any]) -> bool:
    """Append the hot first token, masked; returns whether the response goes on."""
    hot = {**params, "temperature": state.args.rollout_fire_temperature, "max_new_tokens": 1}
    if hot.get("min_new_tokens"):
        hot["min_new_tokens"] = 1
    await _call_engine(state.args, sample, hot, trainable=False)
    if sample.status is not Status.TRUNCATED:
        return False
    sample.status = Status.ABORTED if state.aborted else Status.PENDING
    return not state.aborted


async def generate_and_rm(
    args: Args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Complete one sample, run the sample hooks, score it.

    A sample that is already finished is only scored. With --group-rm (training) scoring is left to the group. Samples
    that were aborted or already have a reward are not scored. A rollout that ends meanwhile leaves a finished sample
    without a reward. With --on-untrusted-reward retry it is made again while its reward is not trusted.

    Returns:
        The sample, or the list that a custom generate function made of it (they share a rollout_id).

    Raises:
        SampleError: the generate function, a hook or the reward failed, or returned what cannot be used.
    """
    if args.on_untrusted_reward != "retry":  # most runs: no coroutine and closure more for each sample
        return await _attempt(args, sample, sampling_params, evaluation)
    return await scoring.until_trusted(args, sample, lambda one: _attempt(args, one, sampling_params, evaluation))


async def _attempt(
    args: Args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Sample | list[Sample]:
    state = GenerateState(args)
    if sample.response_length:  # of an earlier rollout, perhaps of an earlier run
        check_sample(args, f"--data-source-path {hook_name(args.data_source_path)}", sample, evaluation=evaluation)
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length:
        turns_as_tokens(sample)  # masked turns are none any more
        sample.loss_mask = [0] * sample.response_length  # older weights wrote it
    if sample.status in FINISHED:
        if sample.reward is None and sample.end_reason == "grader_error":  # it is asked for its reward again
            sample.end_reason, sample.reward_is_trusted = None, True
        completed: Sample | list[Sample] = sample
    else:
        async with state.semaphore:
            if state.aborted and not evaluation:
                sample.status = Status.ABORTED
                return sample
            begun = WeightClock().version  # the engine names a version when it answers, after a sync perhaps
            begin = time.time()
            completed = await _call_generate(args, sample, sampling_params, evaluation)
            note_begin(flatten(completed), begun)
            note_times(flatten(completed), "generation_s", begin)
    for one in flatten(completed):
        one.note_end()
    completed = await apply_rollout_sample_hooks(args, completed, evaluation=evaluation)
    samples = flatten(completed)
    if isinstance(completed, list):
        scoring.share_rollout_id(sample, samples)
    score = scoring.score_fan_out if isinstance(completed, list) else scoring.score_each
    begin = time.time()
    if evaluation:
        await score(args, samples, evaluation=True)
    elif not args.group_rm:
        await state.score_until_aborted(score(args, samples, evaluation=False))
    note_times(samples, "reward_s", begin)
    went_on("samples", len(samples))
    return samples if isinstance(completed, list) else completed


async def _call_generate(
    args: Args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Sample | list[Sample]:
    name, before = generate_name(args, sample), sample.snapshot()
    if args.save_debug_rollout_data is not None:
        bind_trace(sample)  # the dump is where traces are read
    if sample.status is Status.ABORTED:
        sample.status, sample.end_reason, sample.reward_is_trusted = Status.PENDING, None, True
        if is_traced(sample):
            trace_next_attempt(sample)
    path = sample.generate_function_path or args.custom_generate_function_path
    with blame(name, before), span_if_traced(sample, "generate"):
        if path:
            fn = load_function(path)
            extra = {"evaluation": evaluation} if _has_parameter(fn, "evaluation") else {}
            is_batch = is_batch_generate(fn)
            result = fn(args, [sample], **extra) if is_batch else fn(args, sample, sampling_params, **extra)
            if not inspect.isawaitable(result):
                raise TypeError(f"it is not async, it returned a {type(result).__name__}; write it as `async def`")
            completed: Sample | list[Sample] = await result
            if is_batch:
                completed = await _of_batch(args, completed)
        else:
            completed = await generate(args, sample, sampling_params, evaluation)
        await _give_prompt(args, completed)
    check_completed(args, name, before, completed, evaluation=evaluation)
    return completed


async def _give_prompt(args: Args, completed: Any) -> None:
    """Give a sample whose environment failed before its first token those of its prompt; find images of user code."""
    for sample in completed if isinstance(completed, list) else [completed]:
        if not isinstance(sample, Sample):
            continue
        if not sample.reward_is_trusted and not sample.tokens:
            await _tokenise(sample, GenerateState(args))
        if sample.multimodal_train_inputs and sample.image_spans is None:
            find_images(sample, GenerateState(args).processor)


async def _of_batch(args: Args, completed: Any) -> Any:
    """What a function that takes lists made of a list of one sample; text without tokens gets them.

    Such a function may write only `response`. Then the prompt, a conversation with all turns before the last among
    them, and the response are tokenised, and every token of the response is trained. An aborted text is begun anew.

    Raises:
        TypeError: it is no list.
        ValueError: a sample has a response and tokens, but no response_length.
    """
    if not isinstance(completed, list):
        raise TypeError(f"it got a list of samples and returned a {type(completed).__name__}; return a list")
    for sample in completed:
        if sample.status is Status.PENDING:
            sample.status = Status.COMPLETED
        if sample.response_length:
            continue
        if sample.status is Status.ABORTED:
            sample.response = ""
        elif not sample.tokens:
            await _tokenise(sample, GenerateState(args))
        elif sample.response:
            raise ValueError(f"{describe(sample)} has a response and tokens, but a response_length of 0; set it")
    return completed[0] if len(completed) == 1 else completed


async def _tokenise(sample: Sample, state: GenerateState) -> None:
    """Set a sample's tokens from its prompt and its response."""
    prompt = sample.prompt
    if not isinstance(prompt, str):
        # as such functions render it: what else they gave the template is not known here
        prompt = state.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    response = encode_text(state.tokenizer, sample.response)
    await set_prompt(sample, state, prompt)
    sample.tokens, sample.response_length = [*sample.tokens, *response], len(response)


@functools.cache
def _has_parameter(fn: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(fn).parameters


async def generate_and_rm_group(
    args: Args, group: Group, sampling_params: dict[str, Any], evaluation: bool = False
) -> Group:
    """Complete and score the samples of one prompt; fan-out lists are flattened into the group.

    With deterministic inference each sample gets a sampling seed of its own. With --group-rm the reward function sees
    the whole group at once, unless a sample was aborted. With --advantage-estimator remax one more response is
    generated greedily; its reward becomes metadata["greedy_reward"] of every sample, and it is not trained on.

    Raises:
        SampleError: as `generate_and_rm`; the rest of the group is cancelled.
    """
    state = GenerateState(args)
    if state.aborted and not evaluation:
        for sample in group:
            if sample.status not in FINISHED:
                sample.status = Status.ABORTED
        return group
    calls: list[Any] = []
    for sample in group:
        sample.session_id = sample.session_id or uuid.uuid4().hex
        params = dict(sampling_params)
        if args.sglang_enable_deterministic_inference:
            params["sampling_seed"] = sampling_seed(args.rollout_seed, str(sample.index))
        calls.append(generate_and_rm(args, sample, params, evaluation))
    needs_baseline = not evaluation and _lacks_baseline(args, group)
    if needs_baseline:
        calls.append(_greedy_reward(args, group[0], dict(sampling_params)))
    results = await gather_or_cancel(calls)
    baseline, is_trusted = results.pop() if needs_baseline else (None, True)
    completed = flatten(results)
    check_distinct(generate_name(args, group[0]), completed)
    is_aborted = any(s.status is Status.ABORTED for s in completed)
    if baseline is not None and (is_trusted or not is_aborted):  # else it is asked for again with the group
        for sample in completed:
            sample.metadata[GREEDY_REWARD] = baseline
            sample.reward_is_trusted &= is_trusted  # without a baseline no reward of the group says anything
    if args.group_rm and not evaluation and not is_aborted:
        await state.score_until_aborted(scoring.score_group(args, completed))
    return completed


def is_unfinished(args: Args, group: Group) -> bool:
    """Whether something of a group was aborted: one of its samples, or its greedy baseline."""
    return any(sample.status is Status.ABORTED for sample in group) or _lacks_baseline(args, group)


def _lacks_baseline(args: Args, group: Group) -> bool:
    is_greedy = ESTIMATORS[args.advantage_estimator].baseline == "greedy"
    return is_greedy and any(GREEDY_REWARD not in sample.metadata for sample in group)


async def _greedy_reward(args: Args, sample: Sample, params: dict[str, Any]) -> tuple[float | None, bool]:
    """(reward of the prompt's greedy response; None when the rollout ended first, whether it is trusted)."""
    twin = fresh_copy(sample)
    twin.session_id = uuid.uuid4().hex
    completed = flatten(await generate_and_rm(args, twin, {**params, "temperature": 0.0}))
    last = completed[-1]
    if last.status is Status.ABORTED:
        return None, True
    if args.group_rm:
        await GenerateState(args).score_until_aborted(scoring.score_group(args, completed[-1:]))
    if not last.counts(args):
        return 0.0, False
    return (None if last.reward is None else float(last.get_reward_value(args))), True
