"""Generate functions and a reward for benchmarks: responses of one length, or of lengths with a heavy tail.

The engine's `e2e_latency` travels in `sample.metadata`, so that the benchmark can tell the engine's time from ours.
"""

from __future__ import annotations

import random
from typing import Any

from slime.rollout.sampling.generation import append_engine_output, router_url, tokenize_prompt
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One engine call that ignores the end-of-sequence token."""
    await tokenize_prompt(GenerateState(args), sample)
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {**sampling_params, "ignore_eos": True},
        "return_logprob": True,
    }
    output = await post(f"{router_url(args)}/generate", payload)
    append_engine_output(args, sample, output)
    sample.metadata["engine_s"] = output["meta_info"]["e2e_latency"]
    return sample


async def heavy_tailed(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """`generate` with log-normal lengths, the same in every run: half are at most a sixteenth of the longest."""
    assert sample.index is not None
    length = drawn_length(sample.index, sampling_params["max_new_tokens"])
    return await generate(args, sample, {**sampling_params, "max_new_tokens": length})


def drawn_length(index: int, longest: int) -> int:
    """The length of one sample."""
    drawn = longest / 16 * random.Random(index).lognormvariate(0.0, 1.2)
    return max(1, min(longest, int(drawn)))


async def distinct_characters(args: Any, sample: Sample, **_: Any) -> float:
    """The same reward as TRL's side: the number of distinct characters of the response."""
    return float(len(set(sample.response)))
