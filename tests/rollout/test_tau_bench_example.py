"""examples/tau-bench: a user and a database are the other side; tau2 sits behind the same interface."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from argparse import Namespace
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from aiohttp import web

from examples.tiny import data_parser
from slime.config.parse import CommandLine
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.types import Sample
from tests.rollout.example_fakes import load_example, play, trained_text
from tests.unit.rollout_fakes import serve
from tests.unit.script_fakes import ROOT, run_script, script_flags
from tools.make_tiny_model import build_tokenizer

FOLDER = "tau-bench"
shop = load_example(FOLDER, "shop")
environments = load_example(FOLDER, "tau_environments")
gen = load_example(FOLDER, "generate_with_tau")
mock = load_example(FOLDER, "tau1_mock")
data = load_example(FOLDER, "make_data", own_name="tau_make_data")
adapter = load_example(FOLDER, "openai_tool_adapter")
Status = Sample.Status
END = "<|im_end|>"
TASK = next(task for task in shop.tasks("train") if shop.ORDERS[task].status == "pending")
ORDER = shop.ORDERS[TASK].order_id
OTHER = next(order.order_id for order in shop.ORDERS if order.status == "pending" and order.order_id != ORDER)
ASK, DONE = "Which order number?", "You have your money back."


def call(name: str, order_id: str = ORDER) -> str:
    return data.call(name, order_id)["content"]


RIGHT = [ASK, call("get_order"), call("cancel_order"), DONE]


def new_sample(task: int = TASK) -> Sample:
    return Sample(index=3, group_index=1, prompt=str(task), metadata={"split": "train"})


def run(monkeypatch, replies, *, settings=None, flags=None, **more):
    custom = {"tau": {"env": "shop", "user_strategy": "script", **(settings or {})}}
    flags = {"max_turns": 8, "rollout_max_response_len": 200, "custom_rm_path": None, **(flags or {})}
    return play(monkeypatch, gen.generate, more.pop("sample", new_sample()), replies, custom=custom, **flags, **more)


def test_a_served_customer_is_a_reward_of_one_and_the_model_trains_on_its_own_turns(monkeypatch):
    sample, model = run(monkeypatch, RIGHT)
    assert (sample.reward, sample.status, sample.metadata["tool_calls"]) == (1.0, Status.COMPLETED, 2)
    assert trained_text(model.tokenizer, sample) == "".join(turn + END for turn in RIGHT)
    first, last = model.seen(0), model.seen(3)
    assert shop.POLICY in first and first.endswith(f"{shop.opening(TASK)}{END}\n<|im_start|>assistant\n")
    assert f"<|im_start|>user\nIt is {ORDER}.{END}" in last and '"status": "pending"' in last and "cancelled" in last
    assert shop.STOP not in sample.response, "the user's last word is followed by no turn"
    seen = [request["input_ids"] for request in model.requests]
    assert all(later[: len(ids)] == ids for ids, later in zip(seen, seen[1:], strict=False))
    assert sample.tokens[: len(seen[-1])] == seen[-1]


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        ([ASK, call("cancel_order"), DONE], 1.0),
        ([ASK, call("return_order"), DONE], 0.0),
        ([ASK, call("get_order"), DONE], 0.0),
        ([ASK, call("cancel_order"), call("cancel_order", OTHER), DONE], 0.0),
        ([ASK, call("cancel_order", "7"), call("cancel_order"), DONE], 1.0),
        ([DONE], 0.0),
    ],
)
def test_the_reward_is_the_database(monkeypatch, turns, reward):
    sample, _ = run(monkeypatch, turns)
    assert (sample.reward, sample.status, sample.end_reason) == (reward, Status.COMPLETED, None)


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        ("<tool_call>{no json}</tool_call>", "error: the call is no JSON"),
        ('<tool_call>{"name": "refund", "arguments": {}}</tool_call>', "error: no tool refund; there is get_order"),
    ],
)
def test_a_call_that_cannot_be_made_is_told_to_the_model_and_not_to_the_user(monkeypatch, turn, problem):
    sample, model = run(monkeypatch, [turn, *RIGHT])
    assert problem in model.seen(1) and sample.reward == 1.0
    assert sample.metadata["tool_errors"] == 1


def test_a_thought_is_not_said_and_one_call_of_a_turn_is_made(monkeypatch):
    thought = f"<think>{call('cancel_order', OTHER)}</think>{ASK}"
    sample, model = run(monkeypatch, [thought, call("cancel_order") + call("cancel_order", OTHER), DONE])
    assert f"It is {ORDER}." in model.seen(1)
    assert (sample.reward, sample.metadata["tool_calls"]) == (1.0, 1)


def test_turns_and_context_bound_a_conversation_and_its_reward_is_zero(monkeypatch):
    sample, _ = run(monkeypatch, RIGHT, flags={"max_turns": 2})
    assert (sample.status, sample.end_reason, sample.reward) == (Status.TRUNCATED, "max_turns", 0.0)
    context = len(run(monkeypatch, RIGHT)[0].tokens) - 40
    sample, _ = run(monkeypatch, RIGHT, flags={"rollout_max_context_len": context})
    assert (sample.status, sample.end_reason, sample.reward) == (Status.TRUNCATED, "length", 0.0)
    assert len(sample.tokens) <= context


def test_the_response_length_is_of_a_turn(monkeypatch):
    longest = len(run(monkeypatch, RIGHT)[1].tokenizer.encode(RIGHT[2])) + 2
    sample, model = run(monkeypatch, RIGHT, flags={"rollout_max_response_len": longest})
    assert sample.reward == 1.0 and sample.response_length > longest
    assert {request["sampling_params"]["max_new_tokens"] for request in model.requests} == {longest}


@pytest.mark.parametrize("number", range(4))
def test_an_aborted_conversation_goes_on_where_it_stopped(monkeypatch, number):
    whole, _ = run(monkeypatch, RIGHT)
    half = len(RIGHT[number]) // 2
    aborted, _ = run(monkeypatch, [*RIGHT[:number], (RIGHT[number][:half], "abort")])
    assert (aborted.status, aborted.reward) == (Status.ABORTED, None)
    kept = Sample.from_dict(json.loads(json.dumps(aborted.to_dict())))  # as in another process
    done, _ = run(monkeypatch, [RIGHT[number][half:], *RIGHT[number + 1 :]], sample=kept)
    assert (done.reward, done.status, done.response) == (1.0, Status.COMPLETED, whole.response)
    assert done.metadata["messages"] == whole.metadata["messages"]


class User:
    """A language model that plays the customer, and keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.answer: dict | None = None
        self.port = 0

    async def chat(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        said = f"{ORDER}" if len(self.requests) == 1 else shop.STOP
        message = {"role": "assistant", "content": said}
        known = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
        return web.json_response(
            self.answer or known | {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
        )


def llm_user(user: User) -> dict:
    return {"user_strategy": "llm", "user_url": f"http://127.0.0.1:{user.port}/v1/", "step_timeout_s": 5.0}


@pytest.fixture
def user():
    """A server with the customer."""
    user, app = User(), web.Application()
    app.router.add_post("/v1/chat/completions", user.chat)
    with serve(app) as user.port:
        yield user


def test_a_language_model_plays_the_customer_and_sees_what_was_said_alone(monkeypatch, user):
    sample, model = run(monkeypatch, RIGHT, settings=llm_user(user))
    assert sample.reward == 1.0 and f"user\n{ORDER}{END}" in model.seen(1)
    told = [message["content"] for message in user.requests[1]["messages"]]
    assert told == [shop.instruction(TASK), shop.opening(TASK), ASK, ORDER, DONE]
    roles = [message["role"] for message in user.requests[1]["messages"]]
    assert roles == ["system", "assistant", "user", "assistant", "user"]


@pytest.mark.parametrize("answer", [{"error": "busy"}, {"choices": [{"message": {"content": None}}]}])
def test_a_customer_who_does_not_answer_is_no_fault_of_the_model(monkeypatch, user, answer):
    user.answer = answer
    sample, _ = run(monkeypatch, RIGHT, settings=llm_user(user))
    assert (sample.end_reason, sample.reward_is_trusted) == ("env_error", False)
    assert "the user at http" in sample.metadata["tau_error"]


def test_a_resumed_customer_knows_what_was_said(monkeypatch, user):
    settings = llm_user(user)
    aborted, _ = run(monkeypatch, [*RIGHT[:3], (DONE[:5], "abort")], settings=settings)
    done, _ = run(monkeypatch, [DONE[5:]], settings=settings, sample=aborted)
    assert done.reward == 1.0
    told = [message["content"] for message in user.requests[-1]["messages"]]
    assert told == [shop.instruction(TASK), shop.opening(TASK), ASK, ORDER, DONE]


class Tau2Env:
    """tau2's AgentGymEnv as its version of 2026 behaves: texts with a role in front, the run as JSON in `info`."""

    result = '{"id": 1}'

    def __init__(self, *, domain, task_id, user_llm) -> None:
        self.made, self.actions = (domain, task_id, user_llm), []

    def reset(self):
        tool = SimpleNamespace(openai_schema=shop.TOOLS[1])
        return f"user: task {self.made[1]} of {self.made[0]} by {self.made[2]}", {
            "policy": "Be kind.",
            "tools": [tool],
        }

    def step(self, action):
        self.actions.append(action)
        if action.startswith("{"):
            return "tool: " + action, 0.0, False, False, {"simulation_run": "{}"}
        is_done = action == "bye"
        return "user: hm", float(is_done), is_done, False, {"simulation_run": self.result if is_done else "{}"}


@pytest.fixture
def tau2(monkeypatch):
    """A tau2 that is installed, with two tasks."""
    names = {name: ModuleType(name) for name in ("tau2", "tau2.gym", "tau2.gym.gym_agent", "tau2.registry")}
    tasks = [SimpleNamespace(id="a"), SimpleNamespace(id="b")]
    splits = {"train": ["a", "b"]}
    names["tau2.gym.gym_agent"].AgentGymEnv = Tau2Env
    names["tau2.registry"].registry = SimpleNamespace(
        get_tasks_loader=lambda domain: lambda split: tasks, get_task_splits_loader=lambda domain: lambda: splits
    )
    for name, module in names.items():
        monkeypatch.setitem(sys.modules, name, module)


TAU2 = {"env": "airline", "user_strategy": "llm"}


def test_tau2_is_played_through_the_same_loop(monkeypatch, tau2):
    turns = ["Hello?", call("cancel_order"), "bye"]
    sample, model = run(monkeypatch, turns, settings=TAU2, sample=new_sample(1))
    assert "user\ntask b of airline by gemini/gemini-2.5-flash-lite" in model.seen(0)
    assert "Be kind." in model.seen(0) and '"cancel_order"' in model.seen(0)
    action = json.dumps({"name": "cancel_order", "arguments": {"order_id": ORDER}})
    assert f"<tool_response>\n{action}\n" in model.seen(2)
    assert (sample.reward, sample.status) == (1.0, Status.COMPLETED)


@pytest.mark.skipif(importlib.util.find_spec("tau2") is None, reason="tau2 is optional")
@pytest.mark.parametrize(("title", "reward"), [("Important Meeting", 1.0), ("Lunch", 0.0)])
def test_the_real_tau2_plays_its_tools_and_judges_by_its_database(monkeypatch, user, title, reward):
    monkeypatch.setenv("OPENAI_API_BASE", f"http://127.0.0.1:{user.port}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "true")  # litellm fetches prices otherwise
    settings = {"env": "mock", "user_model_provider": "openai", "user_model": "m"}
    made = json.dumps({"name": "create_task", "arguments": {"user_id": "user_1", "title": title}})
    sample = Sample(index=3, group_index=1, prompt="0", metadata={"split": "base"})
    turns = [f"<tool_call>\n{made}\n</tool_call>", "It is made."]
    sample, model = run(monkeypatch, turns, settings=settings, sample=sample)
    assert (sample.reward, sample.status, sample.reward_is_trusted) == (reward, Status.COMPLETED, True)
    assert trained_text(model.tokenizer, sample) == "".join(turn + END for turn in turns)
    assert "create_task" in model.seen(0) and f'"title": "{title}"' in model.seen(1) and '"task_2"' in model.seen(1)
    told = json.dumps(user.requests[0]["messages"])
    assert "Create a new task called" in told, "the user has the task's instructions"


def test_a_simulation_of_tau2_that_failed_is_no_reward_of_zero(monkeypatch, tau2):
    for result in ("{}", '{"termination_reason": "user_error"}'):
        monkeypatch.setattr(Tau2Env, "result", result)
        sample, _ = run(monkeypatch, ["bye"], settings=TAU2, sample=new_sample(0))
        assert (sample.end_reason, sample.reward_is_trusted) == ("env_error", False)
    monkeypatch.setattr(Tau2Env, "reset", lambda self: ("", {}))
    sample, _ = run(monkeypatch, [], settings=TAU2, sample=new_sample(0))
    assert (sample.end_reason, sample.reward_is_trusted, sample.remove_sample) == ("env_error", False, True)


def test_an_aborted_episode_of_tau2_begins_anew(monkeypatch, tau2):
    sample, _ = run(monkeypatch, ["Hello?", ("b", "abort")], settings=TAU2, sample=new_sample(0))
    assert (sample.status, sample.tokens, sample.prompt) == (Status.ABORTED, [], "0")


def test_tasks_of_tau2_are_written_by_their_splits(tmp_path, tau2):
    assert mock.write_tasks(tmp_path, "retail") == {str(tmp_path / "retail_train_tasks.jsonl"): 2}
    rows = [json.loads(line) for line in (tmp_path / "retail_train_tasks.jsonl").read_text().splitlines()]
    assert rows[1] == {"index": "1", "metadata": {"split": "train", "task_id": "b"}}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"domain": "retail"}, "'domain' is unknown"),
        ({"env": "retail"}, "tau2, which is not installed"),
        ({"env": "shop", "user_strategy": "human"}, "user_strategy human"),
        ({"env": "shop", "agent_strategy": "react"}, "agent_strategy 'react'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_before_the_run(monkeypatch, settings, said):
    monkeypatch.setattr(gen.importlib.util, "find_spec", lambda name: None)
    (problem,) = gen.generate.check_args(Namespace(tau=settings))
    assert said in problem
    assert not list(gen.generate.check_args(Namespace(tau={"env": "shop", "user_strategy": "script"})))


def test_a_turn_is_shown_as_openai_shows_it():
    adapted = adapter.create_openai_adapter(shop.TOOLS).parse_response_to_openai_format("Sure. " + call("get_order"))
    (made,) = adapted["tool_calls"]
    assert made["function"] == {"name": "get_order", "arguments": json.dumps({"order_id": ORDER})}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    output = tmp_path_factory.mktemp("tau")
    data.write_data(data_parser(None).parse_args(["--output", str(output), "--num-demonstrations", "400"]))
    return output


def test_half_of_the_demonstrations_are_right_and_fit_their_limits(files):
    tokenizer, right = build_tokenizer(data.PIECES), 0
    assert len(tokenizer) <= 128 + 16, "the vocabulary of the tiny model"
    for line in (files / "sft.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        order = messages[3]["content"].removeprefix("It is ").rstrip(".")
        database = shop.Shop()
        for action in calls_of(messages):
            with contextlib.suppress(shop.ShopError):
                database.call(*action)
        task = shop.ORDERS.index(shop.BY_ID[order])
        assert task in shop.tasks("train")
        right += database.is_right(task)
        _, mask = MultiTurnLossMaskGenerator(tokenizer).get_loss_mask(messages)
        assert len(mask) < 200
        turns = [message["content"] for message in messages if message["role"] == "assistant"]
        assert max(len(tokenizer.encode(turn)) for turn in turns) < data.MAX_TURN_TOKENS
    assert right / 400 == pytest.approx(0.5, abs=0.1)


def calls_of(messages):
    turns = [message["content"] for message in messages if message["role"] == "assistant"]
    actions = [adapter.create_openai_adapter(shop.TOOLS).action_of(turn) for turn in turns]
    return [(action.name, action.arguments) for action in actions if not isinstance(action, str)]


def test_no_task_is_in_two_splits_and_the_files_name_what_there_is(files):
    indices = {
        split: {json.loads(line)["index"] for line in (files / f"shop_{split}_tasks.jsonl").read_text().splitlines()}
        for split in ("train", "test")
    }
    assert len(indices["test"]) == shop.NUM_HELD_OUT and not indices["train"] & indices["test"]
    assert gen.config_of(Namespace(**yaml.safe_load((files / "tau.yaml").read_text())))["env"] == "shop"
    (dataset,) = yaml.safe_load((files / "eval.yaml").read_text())["eval"]["datasets"]
    assert dataset["path"] == str(files / "shop_test_tasks.jsonl")


def test_the_run_for_gpus_has_flags_that_fit_each_other(tmp_path, monkeypatch, tau2):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / FOLDER))
    (tmp_path / "tau.yaml").write_text("tau: {env: shop, user_strategy: script}\n")
    name, more = f"../examples/{FOLDER}/run_qwen3_4B", ("--custom-config-path", str(tmp_path / "tau.yaml"))
    flags, _ = run_script(tmp_path, name, "--dry-run", *more, SLIME_HOME=str(tmp_path))
    model = script_flags("qwen3-4B-Instruct-2507")
    assert flags[: len(model)] == model
    checked = CommandLine().check(flags)
    assert (checked.problems.wrong, checked.problems.unsupported, checked.warnings()) == ([], [], [])
