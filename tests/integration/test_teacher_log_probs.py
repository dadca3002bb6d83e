"""A real engine as its own teacher: the log-probs that the distillation reward gets are those of the rollout."""

from __future__ import annotations

import asyncio

import pytest

from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.rollout.on_policy_distillation import reward_func
from slime.utils import http_utils
from slime.utils.http_utils import close_http_client
from slime.utils.types import Sample
from tests.unit.rollout_fakes import rollout_args


def generated(engine: SGLangEngine, prompt: list[int], num_tokens: int) -> Sample:
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 1.0, "sampling_seed": len(prompt)}
    payload = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    meta = http_utils.post_sync(f"{engine.url}/generate", payload)["meta_info"]
    pairs = meta["output_token_logprobs"]
    sample = Sample(index=0, tokens=list(prompt))
    sample.append_response_tokens(tokens=[pair[1] for pair in pairs], log_probs=[pair[0] for pair in pairs])
    return sample


def test_a_model_that_teaches_itself_gives_its_own_rollout_log_probs(engine: SGLangEngine) -> None:
    samples = [
        generated(engine, prompt, num_tokens)
        for prompt, num_tokens in (([5], 9), ([9, 30, 31, 77], 1), ([8] * 40, 16))
    ]

    async def score() -> list[float]:
        args = rollout_args(rm_url=f"{engine.url}/generate")
        try:
            return [await reward_func(args, sample) for sample in (*samples, *samples)]  # again: with a cached prefix
        finally:
            await close_http_client()

    assert asyncio.run(score()) == [0.0] * 6
    for sample in samples:
        assert sample.teacher_log_probs == pytest.approx(sample.rollout_log_probs, abs=2e-5)
