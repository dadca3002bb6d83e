"""Generate function and reward of benchmarks/cpu_step.py: responses of one length, and the engine's own time.

The engine's `e2e_latency` travels in `sample.metadata`, so that the benchmark can tell the engine's time from ours.
"""

from __future__ import annotations

from typing import Any

from slime.rollout.sampling.generation import append_engine_output, router_url
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One engine call that ignores the end-of-sequence token."""
    sample.tokens = list(GenerateState(args).encode(sample.prompt))
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {**sampling_params, "ignore_eos": True},
        "return_logprob": True,
    }
    output = await post(f"{router_url(args)}/generate", payload)
    append_engine_output(args, sample, output)
    sample.metadata["engine_s"] = output["meta_info"]["e2e_latency"]
    return sample


async def distinct_characters(args: Any, sample: Sample, **_: Any) -> float:
    """The same reward as TRL's side: the number of distinct characters of the response."""
    return float(len(set(sample.response)))
