"""Partial rollouts on a real engine: an answer that was aborted and gone on with is the one without an abort."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.rollout import sglang_rollout
from slime.rollout.sampling import generation
from slime.rollout.sampling.generation import GenerateState, generate
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils import async_utils, http_utils
from slime.utils.http_utils import post_sync
from slime.utils.types import Sample
from tests.unit.rollout_fakes import LetterTokenizer, rollout_args

SHORT, LONG = 4, 1500


class Prompts:
    """A data source of two prompts: "1" gets a short answer, "2" a long one; what comes back goes out first."""

    def __init__(self) -> None:
        self.waiting = [[Sample(prompt=text, index=i, group_index=i)] for i, text in enumerate("12")]

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        taken, self.waiting = self.waiting[:num_samples], self.waiting[num_samples:]
        return taken

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self.waiting += groups


async def as_long_as_its_prompt_says(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    length = SHORT if sample.prompt == "1" else LONG
    return await generate(args, sample, {**sampling_params, "max_new_tokens": length})


@pytest.fixture
def args(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    GenerateState.clear_instances()
    monkeypatch.setattr(generation, "load_tokenizer", lambda name, **kw: LetterTokenizer())

    async def one_worker(router_url: str) -> list[str]:
        return [engine.url]

    monkeypatch.setattr(sglang_rollout.server_control, "list_workers", one_worker)
    host, _, port = engine.url.removeprefix("http://").rpartition(":")
    return rollout_args(
        sglang_router_ip=host,
        sglang_router_port=int(port),
        rollout_batch_size=1,
        over_sampling_batch_size=2,
        n_samples_per_prompt=1,
        rollout_temperature=0.0,
        rollout_ignore_eos=True,
        partial_rollout=True,
        custom_generate_function_path=f"{__file__}:as_long_as_its_prompt_says",
    )


def test_an_aborted_answer_goes_on_to_what_it_would_have_been(engine: SGLangEngine, args: Namespace) -> None:
    prompts = Prompts()
    try:
        ((short,),) = generate_rollout(args, 0, prompts).samples
        ((partial,),) = prompts.waiting
        cut = partial.response_length
        assert (short.prompt, short.response_length) == ("1", SHORT)
        assert (partial.prompt, partial.status, partial.metadata) == (
            "2",
            Sample.Status.ABORTED,
            {"start_rollout_id": 0},
        )
        assert 0 < cut < LONG and len(partial.rollout_log_probs or []) == cut
        args.over_sampling_batch_size = 1
        ((long,),) = generate_rollout(args, 1, prompts).samples
    finally:
        async_utils.run(http_utils.close_http_client())
        GenerateState.clear_instances()
    sampling = {"max_new_tokens": LONG, "temperature": 0.0, "ignore_eos": True}
    whole = post_sync(
        f"{engine.url}/generate", {"input_ids": [ord("2")], "sampling_params": sampling, "return_logprob": True}
    )
    pairs = whole["meta_info"]["output_token_logprobs"]
    assert long.tokens == [ord("2"), *(pair[1] for pair in pairs)]
    assert long.rollout_log_probs == pytest.approx([pair[0] for pair in pairs], abs=1e-3)
    assert (long.status, len(long.weight_versions), long.reward) == (Sample.Status.TRUNCATED, 2, float(LONG))
