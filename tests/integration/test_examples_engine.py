"""The examples on one real engine: trained are the tokens that it wrote, with the trainer's log-probs.

A random model writes; a turn ends at one of many letters. So conversations have several turns, each of which ends by
itself, and what user, tools and searches say lies between them.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from examples.coding_agent_rl import make_data as coding
from examples.multi_agent.rollout_with_multi_agents import generate_with_multi_agents
from slime.agent import generate as agent_generate
from slime.agent.adapters import common as adapters
from slime.agent.adapters import session as engine_calls
from slime.agent.parsing import ParsedModelOutput
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.rollout.sampling import generation
from slime.rollout.sampling.generation import GenerateState
from slime.utils import async_utils
from slime.utils.types import Sample
from tests.integration.conftest import make_engine
from tests.rollout import test_retool_example as retool
from tests.rollout import test_search_r1_example as search
from tests.rollout import test_tau_bench_example as tau
from tests.unit.rollout_fakes import rollout_args

ASK = [{"role": "user", "content": "1+2?"}]
# name -> (function, sample, settings, what stands in every stretch that the model did not write)
EXAMPLES: dict[str, tuple[Any, Sample, dict[str, Any], str]] = {
    "tau-bench": (
        tau.gen.generate,
        tau.new_sample(),
        {"tau": {"env": "shop", "user_strategy": "script"}},
        "<|im_start|>user\nIt is 5.<|im_end|>\n<|im_start|>assistant\n",
    ),
    "retool": (
        retool.gen.generate,
        retool.new_sample(),
        retool.settings(),
        "<|im_start|>tool\n<interpreter>\n1\n</interpreter><|im_end|>\n<|im_start|>assistant\n",
    ),
    "search-r1": (
        search.gen.generate,
        Sample(index=1, prompt="<|im_start|>user\nwhere?<|im_end|>\n<|im_start|>assistant\n"),
        {"search_r1": {"max_turns": 3}},
        search.gen.HINT,
    ),
    "multi_agent": (
        generate_with_multi_agents,
        Sample(index=1, prompt=ASK, label="3"),
        {"multi_agent": {"num_parallel": 2}},
        "",
    ),
    "coding_agent_rl": (
        agent_generate,
        Sample(index=1, prompt="", metadata=coding.split_bugs(1)[1][0].row()["metadata"]),
        {"agent": coding.agent_config(), "sglang_tool_call_parser": "qwen25", "sglang_reasoning_parser": None},
        "<|im_start|>tool\nwritten<|im_end|>\n<|im_start|>assistant\n",
    ),
}
BEGIN_ANEW = ("multi_agent", "coding_agent_rl")  # what is aborted is not kept


@pytest.fixture(scope="module")
def engine(tiny_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """A server of its own: other tests change the weights of the shared one."""
    running = make_engine(tiny_models[0], tmp_path_factory.mktemp("examples") / "engine_0.log")
    running.start(deadline_s=170)
    yield running
    running.shutdown()


@pytest.fixture(scope="module")
def reference(tiny_models: tuple[Path, Path]) -> Any:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(tiny_models[0], dtype=torch.float32).eval()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """Every (token, log-prob) that the engine answers with, in order."""
    pairs: list[tuple[int, float]] = []
    send = generation.post

    async def post(*given: Any, **keywords: Any) -> Any:
        answer = await send(*given, **keywords)
        pairs.extend((int(token), float(p)) for p, token, *_ in answer["meta_info"]["output_token_logprobs"])
        return answer

    monkeypatch.setattr(generation, "post", post)
    monkeypatch.setattr(engine_calls, "post", post)
    return pairs


def stretches(sample: Sample, tokenizer: Any) -> list[str]:
    """The texts between those that the model wrote."""
    texts: list[list[int]] = [[]]
    for token, bit in zip(sample.tokens[-sample.response_length :], sample.loss_mask or (), strict=True):
        if bit:
            texts += [[]] if texts[-1] else []
        else:
            texts[-1].append(token)
    return [tokenizer.decode(ids) for ids in texts if ids]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_aborted_between", [False, True], ids=["whole", "partial"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_what_the_engine_wrote(
    name: str,
    is_aborted_between: bool,
    engine: SGLangEngine,
    tiny_models: tuple[Path, Path],
    reference: Any,
    written: list[tuple[int, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function, sample, custom, between = EXAMPLES[name]
    monkeypatch.setattr(tau.shop, "scripted_reply", lambda task, said: "It is 5.")
    monkeypatch.setattr(retool.gen, "postprocess_predictions", lambda text: retool.program("print(1)"))

    async def printed(self: Any, code: str) -> str:
        return "1"

    monkeypatch.setattr(retool.tool.PythonSandbox, "execute_code", printed)
    edit = {"name": "write_file", "input": {"path": "ops.py", "content": ""}}
    monkeypatch.setattr(adapters, "parse_model_output", lambda ids, **given: ParsedModelOutput("", "x", [edit]))
    tokenizer = AutoTokenizer.from_pretrained(tiny_models[0])
    host, _, port = engine.url.removeprefix("http://").rpartition(":")
    args = rollout_args(
        hf_checkpoint=str(tiny_models[0]),
        sglang_router_ip=host,
        sglang_router_port=int(port),
        rollout_max_response_len=200,
        rollout_stop_token_ids=tokenizer.convert_tokens_to_ids(list(string.ascii_letters)),
        max_turns=3,
        tool_concurrency=4,
        rm_type="deepscaler",
        custom_rm_path=None,
    )
    vars(args).update(custom)
    sample = Sample.from_dict(sample.to_dict())

    async def play(one: Sample, is_over: bool) -> Any:
        state = GenerateState(args)
        state.aborted = is_over
        return await function(args, one, dict(state.sampling_params), False)

    GenerateState.clear_instances()
    result: Any = sample
    if is_aborted_between and name not in BEGIN_ANEW:
        result = async_utils.run(play(sample, True))
        assert result.status is Sample.Status.ABORTED and result.response_length
    result = async_utils.run(play(result, False))
    GenerateState.clear_instances()

    samples = result if isinstance(result, list) else [result]
    assert len(samples) == (5 if name == "multi_agent" else 1)
    trained: list[tuple[int, float]] = []
    for one in samples:
        assert one.rollout_log_probs is not None and one.loss_mask is not None
        assert all(between in text for text in stretches(one, tokenizer))
        with torch.no_grad():
            log_probs = reference(torch.tensor([one.tokens])).logits[0].log_softmax(-1)
        first = len(one.tokens) - one.response_length
        for position, (bit, own) in enumerate(zip(one.loss_mask, one.rollout_log_probs, strict=True), start=first):
            token = one.tokens[position]
            if bit:
                trained.append((token, own))
                assert own == pytest.approx(log_probs[position - 1, token].item(), abs=1e-4)
            else:
                assert own == 0.0
    if name != "multi_agent":
        assert len(stretches(samples[0], tokenizer)) == 2, "three turns"
    assert sorted(trained) == sorted(written), "every token that the engine wrote, and no other"
