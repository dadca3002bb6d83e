"""slime.rollout.multi_turn over real HTTP with a scripted model: tools are called and masked, turns end and resume."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
from aiohttp import web

from slime.observability.rollout_metrics import multi_turn_metrics
from slime.rollout.collector import Collector
from slime.rollout.hooks.sample_errors import SampleError
from slime.rollout.multi_turn import EnvError, ToolError, final_answer, generate, generate_turns
from slime.rollout.rm_hub import async_rm
from slime.rollout.sampling import generation
from slime.rollout.sampling.generation import GenerateState, generate_and_rm
from slime.rollout.tool_calls import ToolCall, ToolThreads, parse_tool_calls, take_tool_timeouts
from slime.utils import async_utils
from slime.utils.errors import HttpError, UsageError
from slime.utils.types import Sample
from tests.rollout.chat_tokenizers import family_tokenizer
from tests.unit.rollout_fakes import FakeEngine, rollout_args

TOOLS = [{"type": "function", "function": {"name": "add"}}, {"name": "fail"}]
END = "<|im_end|>"
Status = Sample.Status


def call(name: str = "add", **arguments: int) -> str:
    text = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
    return f'<tool_call>{{"name": "{name}", "arguments": {{{text}}}}}</tool_call>'


class ScriptedModel(FakeEngine):
    """Writes the next of `replies` at every call: (text, finish reason), or a text that ends by itself."""

    def __init__(self, tokenizer, replies) -> None:
        super().__init__()
        self.tokenizer, self.replies = tokenizer, list(replies)

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        reply = self.replies.pop(0)
        text, reason = reply if isinstance(reply, tuple) else (reply + END, "stop")
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) >= body["sampling_params"]["max_new_tokens"]:
            ids, reason = ids[: body["sampling_params"]["max_new_tokens"]], "length"
        meta = {"finish_reason": {"type": reason}, "output_token_logprobs": [[-0.5, token, None] for token in ids]}
        meta |= {"completion_tokens": len(ids), "weight_version": "1", "prompt_tokens": len(body["input_ids"])}
        return web.json_response({"text": self.tokenizer.decode(ids), "meta_info": meta})

    def seen(self, number: int) -> str:
        """The prompt of a call, as text."""
        return self.tokenizer.decode(self.requests[number]["input_ids"])


async def add(args, sample, name, arguments):
    if name == "fail":
        raise KeyError("broken tool")
    if "a" not in arguments:
        raise ToolError("a is missing")
    return arguments["a"] + arguments["b"]


def slow(args, sample, name, arguments):
    time.sleep(0.2)
    return "late"


HANGING = threading.Event()
EXIT: type[BaseException] = SystemExit


def exits(args, sample, name, arguments):
    raise EXIT(3)


async def exits_in_a_coroutine(args, sample, name, arguments):
    raise EXIT(3)


def times_out(args, sample, name, arguments):
    raise TimeoutError


@pytest.fixture
def run(monkeypatch):
    """run(replies, ...) -> (result, model): one sample through a generate function against a scripted model."""

    def play(replies, *, function=generate, family="qwen2_5", sample=None, before=None, evaluation=False, **changes):
        tokenizer = family_tokenizer(family)
        GenerateState.clear_instances()
        monkeypatch.setattr(generation, "load_tokenizer", lambda name, **kw: tokenizer)
        extra = {"tool_function_path": "tests.rollout.test_multi_turn:add", "tool_timeout_s": None, "mcp": None}
        extra |= {key: changes.pop(key) for key in list(changes) if key in extra}
        with ScriptedModel(tokenizer, replies).serve() as model:
            args = rollout_args(**{"sglang_router_port": model.port, "rollout_max_response_len": 300, **changes})
            vars(args).update(extra)
            sample = sample or new_sample()

            async def one():
                state = GenerateState(args)
                if before:
                    before(state)
                return await function(args, sample, dict(state.sampling_params), evaluation)

            result = async_utils.run(one())
        GenerateState.clear_instances()
        return result, SimpleNamespace(seen=model.seen, requests=model.requests, tokenizer=tokenizer)

    return play


def new_sample() -> Sample:
    prompt = [{"role": "user", "content": "What is 1+2?"}]
    return Sample(index=5, group_index=2, prompt=prompt, label="3", metadata={"tools": TOOLS})


def test_a_tools_answer_is_appended_untrained_and_the_model_goes_on(run):
    sample, model = run([call(a=1, b=2), "3"])
    assert sample.status is Status.COMPLETED
    assert final_answer(sample) == "3"
    prompt, between = model.seen(0), "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>" + END
    between += "\n<|im_start|>assistant\n"
    assert model.seen(1) == prompt + call(a=1, b=2) + END + between
    trained = [t for t, bit in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if bit]
    assert model.tokenizer.decode(trained) == call(a=1, b=2) + END + "3" + END
    assert sample.response == call(a=1, b=2) + END + between + "3" + END
    assert [lp for lp, bit in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if not bit] == [0.0] * (
        sample.response_length - len(trained)
    )
    assert sample.metadata["messages"] == [
        {"role": "assistant", "content": call(a=1, b=2)},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]
    facts = ("round_number", "tool_calls", "tool_errors", "template_drift")
    assert [sample.metadata[name] for name in facts] == [2, 1, 0, 0]
    assert sample.weight_versions == ["1", "1"]
    assert sample.non_generation_time > 0


def test_an_answer_without_a_call_is_one_turn(run):
    sample, model = run(["3"])
    assert (sample.status, sample.metadata["round_number"], len(model.requests)) == (Status.COMPLETED, 1, 1)
    assert sample.loss_mask == [1] * sample.response_length


def test_several_calls_of_a_turn_are_made_in_order(run):
    _, model = run([call(a=1, b=2) + call(a=5, b=5), "3"])
    assert "<tool_response>\n3\n</tool_response>\n<tool_response>\n10\n</tool_response>" in model.seen(1)


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        ("<tool_call>{oops</tool_call>", "error: the call is no JSON"),
        ("<tool_call>[1]</tool_call>", 'error: a call is a JSON object with "name"'),
        ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', 'error: "arguments" must be a JSON object'),
        (call("multiply"), "error: no tool multiply; there is add, fail"),
        (call(b=1), "error: a is missing"),
        ('<tool_call>{"name": "add"', "error: the call is no JSON"),
    ],
)
def test_a_call_that_the_model_got_wrong_is_answered_with_the_reason(run, wrong, answer):
    sample, model = run([wrong, "sorry"])
    assert f"<tool_response>\n{answer}" in model.seen(1)
    assert (sample.metadata["tool_calls"], sample.metadata["tool_errors"]) == (1, 1)
    assert sample.status is Status.COMPLETED


def test_an_error_of_the_tool_itself_names_the_call(run):
    with pytest.raises(RuntimeError, match=r"tool fail with \{\} raised KeyError: 'broken tool'; raise .*ToolError"):
        run([call("fail")])


def test_a_tool_may_be_a_plain_function_and_has_a_deadline(run):
    path = "tests.rollout.test_multi_turn:slow"
    _, model = run([call(a=1, b=2), "3"], tool_function_path=path)
    assert "<tool_response>\nlate\n" in model.seen(1)
    sample, model = run([call(a=1, b=2), "3"], tool_function_path=path, tool_timeout_s=0.05)
    assert "error: add took more than 0.05 s" in model.seen(1)
    assert sample.metadata["tool_errors"] == 1


@pytest.fixture
def hang():
    """Lets the tools that hang go, at the end of a test; the process's tool threads are new."""
    ToolThreads.clear_instances()
    take_tool_timeouts()
    HANGING.clear()
    yield
    HANGING.set()
    ToolThreads.clear_instances()


def hangs(args, sample, name, arguments):
    if arguments.get("a") == 1:
        HANGING.wait(30)
    return "done"


async def ignores_its_end(args, sample, name, arguments):
    while not HANGING.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)


def test_tools_that_hang_are_counted_and_hold_up_neither_other_tools_nor_graders(run, hang):
    path = "tests.rollout.test_multi_turn:hangs"
    replies = [call(a=1) + call(a=1) + call(a=2), "3"]
    sample, model = run(replies, tool_function_path=path, tool_timeout_s=0.01, tool_concurrency=3)
    answers = [m["content"] for m in sample.metadata["messages"] if m["role"] == "tool"]
    assert answers == ["error: add took more than 0.01 s"] * 2 + ["done"]
    boxed = Sample(label="3", response="\\boxed{3}")
    assert async_utils.run(async_rm(rollout_args(custom_rm_path=None, rm_type="math"), boxed)) == 1
    metrics = Collector(rollout_args(), 0).metrics()
    assert metrics["rollout/tool_timeouts"] == 2.0
    assert "rollout/tool_timeouts" not in Collector(rollout_args(), 1).metrics()


def test_tool_concurrency_bounds_plain_tools_and_the_calls_of_them_that_hang(run, hang):
    path = "tests.rollout.test_multi_turn:hangs"
    with pytest.raises(RuntimeError, match=r"2 tool calls that took more than 0.01 s still hang .*--tool-concurrency"):
        run([call(a=1) * 3], tool_function_path=path, tool_timeout_s=0.01, tool_concurrency=2)


def test_a_coroutine_tool_that_ignores_its_end_is_left_alone(run, hang, monkeypatch):
    monkeypatch.setattr(async_utils, "CANCEL_S", 0.01)
    path = "tests.rollout.test_multi_turn:ignores_its_end"
    sample, _ = run([call(a=1), "3"], tool_function_path=path, tool_timeout_s=0.01)
    assert sample.metadata["messages"][1]["content"] == "error: add took more than 0.01 s"
    assert take_tool_timeouts() == 1


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError, KeyboardInterrupt])
@pytest.mark.parametrize("function", ["exits", "exits_in_a_coroutine"])
def test_a_tool_that_exits_is_named(run, monkeypatch, kind, function):
    monkeypatch.setattr("tests.rollout.test_multi_turn.EXIT", kind)
    with pytest.raises(RuntimeError, match=rf"tool add with \{{.*\}} raised {kind.__name__}: 3; raise"):
        run([call(a=1)], tool_function_path=f"tests.rollout.test_multi_turn:{function}")


def test_a_time_out_inside_a_tool_is_answered_but_is_not_the_tools_own(run):
    sample, _ = run([call(a=1), "3"], tool_function_path="tests.rollout.test_multi_turn:times_out")
    assert sample.metadata["messages"][1]["content"] == "error: add timed out"
    assert take_tool_timeouts() == 0


LOST: list[Exception] = [EnvError("the sandbox is gone"), ConnectionResetError("reset"), HttpError("x", status=503)]


async def loses_its_environment(args, sample, name, arguments):
    raise LOST[arguments["a"]]


@pytest.mark.parametrize("number", range(len(LOST)))
@pytest.mark.parametrize("function", [generate, generate_turns])
def test_a_sample_whose_environment_failed_ends_and_its_reward_is_not_trusted(run, function, number):
    path = "tests.rollout.test_multi_turn:loses_its_environment"
    made, model = run([call(a=number), "3"], function=function, tool_function_path=path)
    for sample in made if isinstance(made, list) else [made]:
        assert (sample.end_reason, sample.reward_is_trusted) == ("env_error", False)
        assert final_answer(sample) == "" and sample.metadata["tool_errors"] == 0
    assert len(model.requests) == 1


def test_what_a_service_refuses_is_an_error_of_the_tool(run, monkeypatch):
    monkeypatch.setattr("tests.rollout.test_multi_turn.LOST", [HttpError("no such page", status=404)])
    with pytest.raises(RuntimeError, match="raised HttpError: no such page"):
        run([call(a=0)], tool_function_path="tests.rollout.test_multi_turn:loses_its_environment")


def test_a_sample_says_why_it_ended(run):
    for replies, changes, reason in (
        (["3"], {}, None),  # `generate_and_rm` reads "done" and "length" off the status
        ([call(a=1, b=2)] * 9, {"max_turns": 2}, "max_turns"),
        ([call(a=1, b=2)] * 9, {"rollout_max_response_len": 60}, "length"),
    ):
        assert run(replies, **changes)[0].end_reason == reason
    turns, _ = run([call(a=1, b=2)] * 9, function=generate_turns, max_turns=2)
    assert [turn.end_reason for turn in turns] == ["max_turns"] * 2
    turns, _ = run([call(a=1, b=2), "3"], function=generate_turns)
    assert [turn.end_reason for turn in turns] == ["done"] * 2


def test_turns_end_at_max_turns_and_a_last_call_is_no_answer(run):
    sample, model = run([call(a=1, b=2)] * 9, max_turns=2)
    assert len(model.requests) == sample.metadata["round_number"] == 2
    assert sample.status is Status.TRUNCATED and final_answer(sample) == ""
    assert sample.loss_mask[-1] == 1, "no generation prompt is left at the end"
    sample, model = run([call(a=1, b=2)] * 9, rollout_max_response_len=9999)
    assert len(model.requests) == 8, "the default"


def test_what_a_tool_says_counts_for_the_length_limits(run):
    first, _ = run([call(a=1, b=2), "3"])
    turn = first.loss_mask.index(0)
    whole, between = first.response_length, first.loss_mask.count(0)
    # The tool's answer fits, and one token of the model after it.
    sample, _ = run([call(a=1, b=2), "3"], rollout_max_response_len=turn + between + 1)
    assert (sample.status, sample.response_length) == (Status.TRUNCATED, turn + between + 1)
    # It does not fit: nothing of it is appended.
    sample, model = run([call(a=1, b=2), "3"], rollout_max_response_len=turn + between)
    assert (sample.status, sample.response_length, len(model.requests)) == (Status.TRUNCATED, turn, 1)
    prompt = len(first.tokens) - whole
    sample, _ = run([call(a=1, b=2), "3"], rollout_max_context_len=prompt + turn + between)
    assert (sample.status, sample.response_length) == (Status.TRUNCATED, turn)
    sample, _ = run([call(a=1, b=2), "3"], rollout_max_context_len=prompt + turn + between, evaluation=True)
    assert sample.status is Status.COMPLETED, "evaluations have a limit of their own"


@pytest.mark.parametrize("cut", [0, 1, 5])
def test_an_aborted_turn_goes_on_where_it_stopped(run, cut):
    whole, _ = run([call(a=1, b=2), "3"])
    tokenizer = family_tokenizer("qwen2_5")
    ids = tokenizer.encode(call(a=1, b=2) + END, add_special_tokens=False)
    head, tail = tokenizer.decode(ids[:cut]), tokenizer.decode(ids[cut:])
    partial, _ = run([(head, "abort")])
    assert (partial.status, partial.response_length) == (Status.ABORTED, cut)
    resumed, _ = run([(tail, "stop"), "3"], sample=Sample.from_dict(partial.to_dict()))
    assert resumed.tokens == whole.tokens
    assert resumed.loss_mask == whole.loss_mask
    assert resumed.rollout_log_probs == whole.rollout_log_probs
    assert resumed.metadata == whole.metadata
    assert resumed.status is Status.COMPLETED


def test_a_rollout_that_ends_while_a_tool_works_keeps_its_answer(run):
    whole, _ = run([call(a=1, b=2), "3"])

    def stop_soon(state):
        state.aborted = True

    partial, model = run([call(a=1, b=2)], before=stop_soon)
    assert (partial.status, len(model.requests)) == (Status.ABORTED, 1)
    assert partial.loss_mask[-1] == 0, "ends with the tool's answer"
    resumed, model = run(["3"], sample=partial)
    assert resumed.tokens == whole.tokens and resumed.metadata == whole.metadata
    sample, _ = run([call(a=1, b=2), "3"], before=stop_soon, evaluation=True)
    assert sample.status is Status.COMPLETED, "an evaluation goes on"


def test_a_sample_that_begins_anew_forgets_the_conversation_before(run):
    again = new_sample()
    again.metadata |= {"messages": [{"role": "assistant", "content": "old"}], "round_number": 7, "turn_start": 3}
    sample, _ = run(["3"], sample=again)
    assert [message["content"] for message in sample.metadata["messages"]] == ["3"]
    assert sample.metadata["round_number"] == 1 and sample.metadata["tools"] == TOOLS


def test_each_turn_may_be_a_sample_of_its_own(run):
    thought = "<think>\nHm.\n</think>\n\n"
    turns, model = run([thought + call(a=1, b=2), thought + "3"], function=generate_turns, family="qwen3")
    assert [turn.rollout_id for turn in turns] == [5, 5] and [turn.group_index for turn in turns] == [2, 2]
    assert [turn.response for turn in turns] == [thought + call(a=1, b=2) + END, thought + "3" + END]
    assert all(turn.loss_mask == [1] * turn.response_length for turn in turns)
    assert [final_answer(turn) for turn in turns] == ["3", "3"], "every sibling is scored by the end"
    assert [turn.metadata["round_number"] for turn in turns] == [1, 2]
    for number, turn in enumerate(turns):
        prompt = turn.tokens[: len(turn.tokens) - turn.response_length]
        assert prompt == model.requests[number]["input_ids"]
    rendered = model.tokenizer.apply_chat_template(
        [*turns[0].prompt, *turns[1].metadata["messages"][:2]], tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    assert model.seen(1) == rendered, "each prompt is what the template shows"


def test_a_fan_out_ends_at_max_turns_and_begins_anew_after_an_abort(run):
    turns, _ = run([call(a=1, b=2)] * 5, function=generate_turns, max_turns=3)
    assert [turn.status for turn in turns] == [Status.COMPLETED] * 2 + [Status.TRUNCATED]
    assert turns[-1].metadata["tool_calls"] == 3
    turns, _ = run([call(a=1, b=2), ("3", "length")], function=generate_turns)
    assert [final_answer(turn) for turn in turns] == ["", ""], "the last turn was cut off"
    (sample,), _ = run([call(a=1, b=2), ("x", "abort")], function=generate_turns)
    assert (sample.status, sample.tokens, sample.response_length) == (Status.ABORTED, [], 0)
    (sample,), model = run([], function=generate_turns, before=lambda state: setattr(state, "aborted", True))
    assert (sample.status, model.requests) == (Status.ABORTED, [])


def test_through_the_rollout_a_fan_out_is_scored_turn_by_turn(run):
    async def scored(args, sample, sampling_params, evaluation):
        return await generate_and_rm(args, sample, sampling_params, evaluation)

    path = "slime.rollout.multi_turn:generate_turns"
    turns, _ = run([call(a=1, b=2), "3"], function=scored, custom_generate_function_path=path)
    assert [turn.reward for turn in turns] == [float(turn.response_length) for turn in turns]
    path = "slime.rollout.multi_turn:generate"
    with pytest.raises(SampleError, match="slime.rollout.multi_turn:generate failed on sample 5 .*RuntimeError: tool"):
        run([call("fail")], function=scored, custom_generate_function_path=path)


@pytest.mark.parametrize("path", [None, "tests.rollout.test_multi_turn:nothing"])
def test_a_missing_tool_function_is_named(run, path):
    with pytest.raises(UsageError, match="tool_function_path"):
        run([call(a=1, b=2)], tool_function_path=path)


def test_a_prompt_that_is_text_or_a_response_of_another_function_is_refused(run):
    with pytest.raises(UsageError, match="list of messages, not 'text'.*--apply-chat-template off"):
        run([], sample=Sample(prompt="text"))
    stranger = new_sample()
    stranger.tokens, stranger.response_length = [1, 2], 1
    with pytest.raises(ValueError, match="a response that slime.rollout.multi_turn did not write"):
        run([], sample=stranger)


def test_calls_are_found_outside_of_thoughts_only():
    text = f"<think>maybe {call(a=9)}</think>{call(a=1)} and {call('fail')}"
    assert parse_tool_calls(text) == [ToolCall("add", {"a": 1}), ToolCall("fail", {})]
    assert parse_tool_calls("no call") == []


def test_many_conversations_run_at_once_without_mixing(run):
    """Each tool answers with the sample's own number; turns of all samples interleave."""

    async def many(args, sample, sampling_params, evaluation):
        samples = [new_sample() for _ in range(8)]
        return await asyncio.gather(*(generate(args, one, dict(sampling_params)) for one in samples))

    samples, _ = run([call(a=1, b=2)] * 8 + ["3"] * 8, function=many)
    assert {tuple(sample.tokens) for sample in samples} == {tuple(samples[0].tokens)}
    assert all(sample.metadata["messages"][1]["content"] == "3" for sample in samples)


def test_tool_calls_and_drift_become_metrics(run):
    kept, _ = run([call(a=1, b=2) + call("fall"), "3"])
    plain, _ = run(["3"])
    drifted, _ = run(["\n3"])
    metrics = multi_turn_metrics([kept, plain, drifted, Sample()])
    assert metrics["tool_call_rate"] == 1 / 3, "of the samples that were generated over several turns"
    assert metrics["tool_error_rate"] == 1 / 2, "of the calls"
    assert metrics["template_drift"] == drifted.metadata["template_drift"] / 3 > 0
    assert metrics["multi_turn_metric/round_number_max"] == 2
    assert "tool_call_rate" not in multi_turn_metrics([Sample()])
