"""A search agent: the model asks with <search>, reads what a retrieval server found, and ends with <answer>.

Written as users write such modules: the sample's fields are set by hand, token by token.
"""

from __future__ import annotations

import asyncio
import re

from slime.rollout.rm_hub import f1_score
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

SEARCH_CONFIG = {"max_turns": 3, "topk": 1, "concurrency": 8}
SEMAPHORE = asyncio.Semaphore(SEARCH_CONFIG["concurrency"])


async def search(args, query: str) -> str:
    async with SEMAPHORE:
        found = await post(args.search_url, {"queries": [query], "topk": SEARCH_CONFIG["topk"]})
    return "\n".join(document["contents"] for document in found["result"][0])


async def execute(args, text: str) -> tuple[str, bool]:
    """(what the model reads next, whether it is done)."""
    if asked := re.search(r"<search>(.*?)</search>", text, re.DOTALL):
        return f"<information>{await search(args, asked[1].strip())}</information>", False
    if "<answer>" in text:
        return "", True
    return "Use <search> or <answer>.", False


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "partial rollout is not supported by this agent"
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, response_ids, loss_mask, log_probs, turn = "", [], [], [], 0
    while turn < SEARCH_CONFIG["max_turns"]:
        turn += 1
        payload = {
            "input_ids": prompt_ids + response_ids,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        output = await post(url, payload)
        finish = output["meta_info"]["finish_reason"]["type"]
        if finish == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        new_ids = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        response += output["text"]
        response_ids += new_ids
        loss_mask += [1] * len(new_ids)
        log_probs += [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        if finish == "length":
            break
        observation, done = await execute(args, output["text"])
        if done:
            break
        observation_ids = state.tokenizer(observation, add_special_tokens=False)["input_ids"]
        response += observation
        response_ids += observation_ids
        loss_mask += [0] * len(observation_ids)
        log_probs += [0.0] * len(observation_ids)

    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = loss_mask
    sample.rollout_log_probs = log_probs
    sample.metadata["round_number"] = turn
    match finish:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("sample must be a Sample")
    answers = re.findall(r"<answer>(.*?)</answer>", sample.response, re.DOTALL)
    score = f1_score(answers[-1], sample.label)[0] if answers else 0.0
    return {"score": score, "answered": bool(answers)}
