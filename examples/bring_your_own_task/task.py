"""The hooks of the task: how a sample is generated, what it is worth, and which groups are trained on."""

from __future__ import annotations

from typing import Any

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Ask an engine once. Tools, several turns or an environment of yours would go here."""
    prompt_ids = GenerateState(args).tokenizer.encode(sample.prompt, add_special_tokens=False)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    request = {"input_ids": prompt_ids, "sampling_params": sampling_params, "return_logprob": True}
    answer = await post(url, request)
    drawn = answer["meta_info"]["output_token_logprobs"]  # (log-prob, token id, text) of each new token
    sample.tokens = list(prompt_ids)
    sample.append_response_tokens(
        args,
        tokens=[token for _, token, _ in drawn],
        log_probs=[log_prob for log_prob, _, _ in drawn],
        text=answer["text"],
        meta_info=answer["meta_info"],
    )
    return sample


async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Return the share of right characters, and `partial_credit` of it for an answer that is not all right."""
    text = sample.response.removesuffix("<|im_end|>").strip()
    if text == sample.label:
        return 1.0
    right = sum(a == b for a, b in zip(text, str(sample.label), strict=False))
    return args.partial_credit * right / max(len(text), len(str(sample.label)))


def keep(args: Any, group: list[Sample]) -> DynamicFilterOutput:
    """Drop a group whose rewards are all equal: it teaches GRPO nothing."""
    differs = len({sample.reward for sample in group}) > 1
    return DynamicFilterOutput(keep=differs, reason=None if differs else "all_equal")
