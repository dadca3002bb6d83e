"""examples/strands_sglang: the reward, the sandboxed tool, and, with Strands installed, the agent."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from types import SimpleNamespace

import pytest

from examples.strands_sglang import generate_with_strands as gen
from examples.strands_sglang.subprocess_interpreter import SubprocessInterpreter
from slime.agent import rollout
from slime.agent.gateway import Gateway
from slime.agent.sandbox import SandboxError
from slime.config.parse import CommandLine
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.rollout import test_example_loop as loop
from tests.unit.agent_fakes import ScriptedEngine, served
from tests.unit.script_fakes import run_script, script_flags
from tools.make_tiny_model import build_tokenizer

callbacks = loop.callbacks
TOKENIZER, END = build_tokenizer(), "<|im_end|>"
needs_strands = pytest.mark.skipif(importlib.util.find_spec("strands") is None, reason="strands-agents is optional")


@pytest.mark.parametrize(
    ("said", "turns", "reward"),
    [
        ("\\boxed{42}", 1, 1.0),
        ("Answer: 42", 3, 1.0),
        ("\\boxed{41}", 1, -1.1),
        ("\\boxed{41}", 3, -1.0),
        ("\\boxed{41}", 11, -0.6),
        ("I do not know", 3, -1.0),
    ],
)
def test_a_wrong_answer_loses_less_for_each_turn_with_a_tool(said, turns, reward):
    sample = Sample(label="42", response=said, metadata={"agent": {"turns": turns}})
    assert asyncio.run(gen.reward_func(SimpleNamespace(), sample)) == pytest.approx(reward)


def test_programs_run_in_a_sandbox_with_a_limit_of_time():
    run = SubprocessInterpreter(execution_timeout=10.0).run
    assert asyncio.run(run("print(6*7)")) == "42"
    assert asyncio.run(run("echo $((6*7))", "bash")) == "42"
    assert "ZeroDivisionError" in asyncio.run(run("1/0"))
    assert "took more than 0.3 s" in asyncio.run(SubprocessInterpreter(execution_timeout=0.3).run("while True: pass"))
    with pytest.raises(ValueError, match="python, bash, not 'r'"):
        asyncio.run(run("1", "r"))


def test_a_run_without_strands_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setattr(gen.importlib.util, "find_spec", lambda name: None)
    (problem,) = gen.generate.check_args(SimpleNamespace())
    assert "pip install 'strands-agents[openai]'" in problem


@pytest.fixture
def execute(monkeypatch):
    """execute(texts): a sample through `generate` with an engine that writes them."""
    SingletonMeta.clear_instances(rollout.Places)
    monkeypatch.setattr(rollout, "GenerateState", lambda args: SimpleNamespace(aborted=False))

    def execute(texts, prompt=({"role": "user", "content": "6*7"},), *, before_more=None, **engine_settings):
        """With `before_more`: the samples of an execution, then after its call of one for each other text at once."""
        engine = ScriptedEngine(TOKENIZER, [f"{text}{END}" for text in texts], **engine_settings)
        with served(engine.app) as url:
            gateway = Gateway(tokenizer=TOKENIZER, sglang_url=url, tool_parser="hermes").start()

            async def shared(args):
                return gateway

            monkeypatch.setattr(rollout, "shared_gateway", shared)
            names = ("max_turns", "rollout_max_context_len", "eval_max_context_len", "reward_key", "eval_reward_key")
            args = SimpleNamespace(**dict.fromkeys(names), partial_rollout=False)

            async def one():
                sample = Sample(index=3, prompt=list(prompt), label="42")
                return await gen.generate(args, sample, {"max_new_tokens": 200})

            async def several():
                first = await one()
                before_more()
                return [first, *await asyncio.gather(*(one() for _ in texts[1:]))]

            try:
                return asyncio.run(several() if before_more else one())
            finally:
                gateway.stop()

    yield execute
    SingletonMeta.clear_instances(rollout.Places)


def call(code: str) -> str:
    name = "execute_python_code"
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'code': code}})}\n</tool_call>"


@needs_strands
def test_an_agent_of_strands_trains_the_tokens_of_the_engine(execute):
    texts = [call("print(6*7)"), "\\boxed{42}"]
    sample = execute(texts)
    ids = sample.tokens[-sample.response_length :]
    written = [token for token, bit in zip(ids, sample.loss_mask, strict=True) if bit]
    assert TOKENIZER.decode(written) == "".join(text + END for text in texts)
    assert "42" in TOKENIZER.decode([token for token, bit in zip(ids, sample.loss_mask, strict=True) if not bit])
    assert (sample.end_reason, sample.metadata["agent"]["turns"]) == ("done", 2)


@needs_strands
def test_no_callback_of_an_agent_of_strands_computes_for_more_than_50_ms(execute, callbacks):
    """Of no thread: not the loop's, and not the gateway's, whose loop all agents share."""
    samples = execute((1 + loop.NUM_SAMPLES) * ["\\boxed{42}"], before_more=callbacks.clear)
    assert {(sample.end_reason, sum(sample.loss_mask) > 0) for sample in samples} == {("done", True)}
    assert [slow for thread in callbacks.values() for slow in thread if slow[0] > loop.LIMIT_S] == []


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "6*7"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "and 7*8?"},
]


def test_the_agent_gets_all_messages_of_a_prompt():
    system, messages = gen.conversation_of(Sample(prompt=TALK))
    assert system == f"{gen.SYSTEM_PROMPT}\n\nBe brief."
    assert messages == [{"role": m["role"], "content": [{"text": m["content"]}]} for m in TALK[1:]]
    assert gen.conversation_of(Sample(prompt="6*7")) == (gen.SYSTEM_PROMPT, messages[:1])


@needs_strands
def test_the_model_sees_all_messages_of_a_prompt(execute):
    sample = execute(["\\boxed{56}"], TALK)
    asked = TOKENIZER.decode(sample.tokens[: -sample.response_length])
    order = [asked.index(f"<|im_start|>{m['role']}\n{m['content']}{END}") for m in TALK[1:]]
    assert order == sorted(order) and f"Be brief.{END}" in asked


@needs_strands
def test_turns_are_bounded_and_a_sandbox_that_fails_is_no_fault_of_the_model(execute, monkeypatch):
    sample = execute([call("print(1)")] * 20)
    assert (sample.end_reason, sample.metadata["agent"]["turns"]) == ("max_turns", gen.MAX_TOOL_ITERS + 1)

    async def refuse(code):
        raise SandboxError("the kernel refuses")

    monkeypatch.setattr(gen, "execute_python_code", refuse)
    sample = execute([call("print(1)"), "\\boxed{42}"])
    assert (sample.end_reason, sample.reward_is_trusted, sample.remove_sample) == ("env_error", False, True)


@needs_strands
def test_an_answer_that_is_cut_off_by_its_length_ends_the_sample_and_not_the_run(execute):
    sample = execute(["\\boxed{4"], finish="length")
    assert (sample.end_reason, sample.status) == ("length", Sample.Status.TRUNCATED)
    assert sum(sample.loss_mask) == sample.response_length


def test_the_run_for_gpus_has_flags_that_fit_each_other(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(gen.importlib.util, "find_spec", lambda name: name == "strands" or found(name))
    script = "../examples/strands_sglang/strands_qwen3_8b"
    flags, _ = run_script(tmp_path, script, "--dry-run", SLIME_HOME=str(tmp_path))
    assert flags[: len(script_flags("qwen3-8B"))] == script_flags("qwen3-8B")
    checked = CommandLine().check(flags)
    assert (checked.problems.wrong, checked.problems.unsupported, checked.warnings()) == ([], [], [])
