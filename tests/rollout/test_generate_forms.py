"""A generate function as an older document writes it: a file alone, a list of samples, text without tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.rollout.hooks.sample_errors import SampleError
from slime.rollout.sampling import generation, images
from slime.rollout.sampling.generation import generate_and_rm
from slime.utils.misc import load_function
from slime.utils.types import Sample
from tests.rollout.test_multi_turn import END, call, new_sample, run
from tests.unit.argument_lines import Check, check, command_line, has

__all__ = ["check", "command_line", "run"]  # fixtures

# The agent of the document: it asks the engine itself, runs a tool, and writes only text and reward.
AGENT = """
import json, re, subprocess, sys
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post

async def custom_generate(args, samples, evaluation=False):
    state, url = GenerateState(args), f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    for sample in samples:
        conversation = sample.prompt
        for turn in range(args.max_turns):
            text = state.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
            ids = state.tokenizer.encode(text, add_special_tokens=False)
            answer = await post(url, {"input_ids": ids, "sampling_params": {"max_new_tokens": 99}})
            sample.response = answer["text"].removesuffix("<|im_end|>")
            asked = re.search("<tool_call>(.*)</tool_call>", sample.response)
            if not asked:
                break
            numbers = json.loads(asked[1])["arguments"]
            code = f"print({numbers['a']} + {numbers['b']})"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            conversation.append({"role": "assistant", "content": sample.response})
            conversation.append({"role": "tool", "content": done.stdout.strip()})
        sample.reward = float(sample.response == sample.label)
    return samples
"""


@pytest.fixture
def agent(tmp_path: Path) -> str:
    """The path of a file with the agent."""
    (tmp_path / "custom_generate.py").write_text(AGENT)
    return str(tmp_path / "custom_generate.py")


def test_an_agent_that_takes_a_list_and_writes_text_is_trained_on_its_last_turn(run, agent: str) -> None:
    sample, model = run(
        [call(a=1, b=2), "3"], function=generate_and_rm, custom_generate_function_path=agent, max_turns=5
    )
    assert (sample.status, sample.reward, sample.response) == (sample.Status.COMPLETED, 1.0, "3")
    prompt = model.seen(1)
    assert call(a=1, b=2) + END in prompt and "<tool_response>\n3\n</tool_response>" in prompt
    assert model.tokenizer.decode(sample.tokens) == prompt + "3"
    assert model.tokenizer.decode(sample.tokens[-sample.response_length :]) == "3"


def test_a_function_of_a_list_returns_a_list(run, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("async def custom_generate(args, samples):\n    return samples[0]\n")
    with pytest.raises(SampleError, match="it got a list of samples and returned a Sample; return a list"):
        run([], function=generate_and_rm, custom_generate_function_path=str(tmp_path / "one.py"), sample=new_sample())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"response": "no", "status": Sample.Status.ABORTED}, ("", [], 0)),  # begun anew with the next weights
        ({"response": ""}, ("", [112], 0)),  # the model ended at once: there is a prompt to show for it
        ({"response": "no"}, ("no", [112, 110, 111], 2)),
        ({"response": "no", "tokens": [112, 9], "response_length": 1}, ("no", [112, 9], 1)),
    ],
)
def test_what_a_function_of_a_list_leaves_out_is_made_from_its_text(monkeypatch, changes, expected) -> None:
    monkeypatch.setattr(generation, "GenerateState", lambda args: SimpleNamespace(tokenizer=None))
    for module in (generation, images):
        monkeypatch.setattr(module, "encode_text", lambda tokenizer, text: list(text.encode()))
    sample = asyncio.run(generation._of_batch(None, [Sample(prompt="p", **changes)]))
    assert (sample.response, sample.tokens, sample.response_length) == expected


def test_tokens_of_a_list_without_a_length_are_refused(monkeypatch) -> None:
    with pytest.raises(ValueError, match="a response_length of 0; set it"):
        asyncio.run(generation._of_batch(None, [Sample(prompt="p", response="no", tokens=[112, 9])]))


def test_each_older_form_has_one_warning_with_the_recommended_one(check: Check, agent: str) -> None:
    given = check(f"--custom-generate-function-path {agent}")
    assert given.problems.all() == []
    (file,) = [said for said in given.warnings() if "only public coroutine" in said]
    assert file.endswith(f"write {agent}:custom_generate.")
    (batch,) = [said for said in given.warnings() if "takes a list of samples" in said]
    assert "write async def custom_generate(args, sample, sampling_params, evaluation=False)" in batch
    assert len(check(f"--custom-generate-function-path {agent}:custom_generate").warnings()) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("async def a(): pass\nasync def b(): pass\n", "has the public coroutines a and b; write {path}:function."),
        ("def a(): pass\nasync def _b(): pass\n", "has no public coroutine; write {path}:function."),
        ("from asyncio import sleep\n", "has no public coroutine; write {path}:function."),
    ],
)
def test_a_file_without_one_coroutine_is_refused(check: Check, tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "several.py"
    path.write_text(text)
    refused = check(f"--custom-generate-function-path {path}").problems.environment
    has(refused, f"{path} names a file but no function in it, and " + problem.format(path=path))


def test_a_file_is_taken_as_its_only_public_coroutine(agent: str) -> None:
    assert load_function(agent) is load_function(f"{agent}:custom_generate")
