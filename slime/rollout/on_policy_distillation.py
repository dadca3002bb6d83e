"""On-policy distillation from a teacher that an SGLang engine serves: the reward hook asks for its log-probs.

    --custom-rm-path slime.rollout.on_policy_distillation.reward_func
    --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards
    --rm-url http://<teacher>/generate            (or a model named "teacher" under --sglang-config)

Every reward is 0.0: what is learnt comes from `Sample.teacher_log_probs`, which the trainer turns into a penalty
(--use-opd). Departs from upstream in one point: the log-probs are on the sample as soon as it is scored, so that
filters, dumps and hooks see a number as its reward, not the teacher's whole answer.
"""

from __future__ import annotations

import copy
from typing import Any

from slime.config.args import Args
from slime.rollout.rm_hub.service import Service, ask, unusable
from slime.rollout.sampling.engine_request import required_model_url
from slime.rollout.sampling.generation import GenerateState
from slime.rollout.sampling.images import engine_ids, image_data
from slime.utils.async_utils import gather_or_cancel
from slime.utils.http.api_keys import protect_service
from slime.utils.types import Sample

MODEL_NAME = "teacher"
MAX_IN_FLIGHT = 512  # the engine batches
TIMEOUT_S = 600.0  # one forward pass, behind those of the others
SAMPLING_PARAMS = {"temperature": 1.0, "max_new_tokens": 0, "skip_special_tokens": False}


async def reward_func(args: Args, sample: Sample | list[Sample], **kwargs: Any) -> float | list[float]:
    """Put the teacher's log-probs of the response tokens, at temperature 1, on each sample ([R]) and return 0.0s.

    Raises:
        RewardError: the teacher failed, or answered about other tokens (it must share the policy's vocabulary).
        ValueError: there is neither --rm-url nor a model named "teacher".
    """
    if isinstance(sample, list):
        return await gather_or_cancel(_ask_teacher(args, each) for each in sample)
    return await _ask_teacher(args, sample)


async def _ask_teacher(args: Args, sample: Sample) -> float:
    if not sample.response_length:
        sample.teacher_log_probs = []
        return 0.0
    media = GenerateState(args).media if sample.image_spans else None
    if media and media.end(sample):  # the teacher would wait for its image: the token is a word, and is not learnt
        told = copy.copy(sample)
        told.tokens, told.response_length = sample.tokens[:-1], sample.response_length - 1
        await _ask_teacher(args, told)
        sample.teacher_log_probs = [*(told.teacher_log_probs or []), 0.0]
        sample.loss_mask = [*(sample.loss_mask or [1] * sample.response_length)[:-1], 0]
        return 0.0
    service = _teacher(args)
    # From the last prompt token on: an engine gives no log-prob to the first token it is asked about.
    start = max(len(sample.tokens) - sample.response_length - 1, 0)
    payload = {
        "input_ids": engine_ids(sample, media),
        "sampling_params": SAMPLING_PARAMS,
        "return_logprob": True,
        "logprob_start_len": start,
    }
    if sample.image_spans:
        payload["image_data"] = image_data(sample)
    answer = await ask(service, payload, sample)
    sample.teacher_log_probs = _response_log_probs(service, sample, answer)
    return 0.0


def post_process_rewards(args: Args, samples: list[Sample], **kwargs: Any) -> tuple[list[float], list[float]]:
    """(raw rewards, rewards for training), all 0.0.

    Raises:
        ValueError: a sample was not scored by `reward_func`.
    """
    for sample in samples:
        if sample.teacher_log_probs is None or len(sample.teacher_log_probs) != sample.response_length:
            found = "no" if sample.teacher_log_probs is None else len(sample.teacher_log_probs)
            raise ValueError(
                f"sample {sample.index} has {found} teacher_log_probs for {sample.response_length} response tokens; "
                "--custom-rm-path slime.rollout.on_policy_distillation.reward_func sets them"
            )
    return [0.0] * len(samples), [0.0] * len(samples)


def _teacher(args: Args) -> Service:
    if args.rm_url:
        protect_service(args.rm_url)
        return Service(
            "the teacher of --rm-url", args.rm_url, MAX_IN_FLIGHT, timeout_s=TIMEOUT_S, proxy=args.http_proxy
        )
    remedy = "give --rm-url, the address of a teacher's /generate, or name one under --sglang-config"
    url = required_model_url(args, MODEL_NAME, "/generate", remedy=remedy)
    return Service("the model 'teacher'", url, MAX_IN_FLIGHT, timeout_s=TIMEOUT_S)


def _response_log_probs(service: Service, sample: Sample, answer: Any) -> list[float]:
    meta_info = answer.get("meta_info") if isinstance(answer, dict) else None
    pairs = meta_info.get("input_token_logprobs") if isinstance(meta_info, dict) else None
    if not isinstance(pairs, list) or len(pairs) < sample.response_length:
        raise unusable(service, sample, answer)
    pairs, first = pairs[-sample.response_length :], len(sample.tokens) - sample.response_length
    for start, length in sample.image_spans or ():  # of tools: an engine has ids of its own for the tokens of images
        for place in range(start - first, start - first + length) if start >= first else ():
            pairs[place] = [0.0, sample.tokens[start], None]
    if [pair[1] for pair in pairs] != sample.tokens[first:]:
        raise unusable(service, sample, "log-probs of other tokens than those of the response")
    if any(pair[0] is None for pair in pairs):
        raise unusable(service, sample, "no log-prob for a response token; a prompt must have at least one token")
    return [float(pair[0]) for pair in pairs]
