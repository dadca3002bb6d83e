"""Environments in a process of their own: the real server, started as a run does it, and the generate function.

The environment is `Echo` below, a class that needs no framework: it repeats what the model says, twice, and its reward
is the number of steps. The model is scripted; everything between them is the real code.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.rollout.sampling import generation
from slime.rollout.sampling.generation import GenerateState
from slime.utils import async_utils
from slime.utils.errors import UsageError
from slime.utils.types import Sample
from slime_plugins.environments.process import Environments, check_args, probe, read_settings
from slime_plugins.environments.rollout import generate
from tests.rollout.chat_tokenizers import family_tokenizer
from tests.rollout.test_multi_turn import ScriptedModel
from tests.unit.rollout_fakes import rollout_args

Status = Sample.Status
ECHO = """
import os
import time

class Echo:
    drives_model, num_tasks = False, 3

    def __init__(self, steps=2, fail=None):
        self.steps = steps
        if fail:
            raise RuntimeError(fail)

    def prompt(self, task):
        return {"messages": [{"role": "user", "content": f"say {task}"}], "tools": None}

    def start(self, task):
        return Episode(self, task)

class Episode:
    def __init__(self, owner, task):
        self.owner, self.count = owner, 0
        self.messages, self.tools = owner.prompt(task)["messages"], None

    def step(self, text, calls):
        if text == "hang":
            time.sleep(30)
        if text == "die":
            os._exit(9)
        if text == "raise":
            raise SystemExit("no")
        self.count += 1
        said = [call["name"] for call in calls] or text
        return {"messages": [{"role": "user", "content": f"{said}!"}], "done": self.count >= self.owner.steps}

    def finish(self):
        reward = float("nan") if self.owner.steps == 1 else float(self.count)
        return {"reward": reward, "metrics": {"steps": self.count}}
"""


@pytest.fixture
def settings(tmp_path: Path):
    """The key `environment` of a custom config."""
    (tmp_path / "echo.py").write_text(ECHO)
    return {"framework": "python", "name": "echo:Echo", "python": sys.executable, "paths": [str(tmp_path)]}


@pytest.fixture
def play(monkeypatch, settings, tmp_path):
    """play(replies, **settings) -> (sample, model): one sample, in the processes of an earlier call."""

    def one(replies, *, task=1, prompt="say 1", flags=None, before=None, **changes):
        tokenizer = family_tokenizer("qwen2_5")
        GenerateState.clear_instances()
        monkeypatch.setattr(generation, "load_tokenizer", lambda name, **kw: tokenizer)
        with ScriptedModel(tokenizer, replies).serve() as model:
            given = {"sglang_router_port": model.port, "rollout_max_response_len": 300, "output_dir": str(tmp_path)}
            args = rollout_args(**given, **(flags or {}))
            vars(args)["environment"] = settings | changes
            metadata = {"environment": {"task": task}}
            sample = Sample(index=5, prompt=[{"role": "user", "content": prompt}], metadata=metadata)

            async def run():
                state = GenerateState(args)
                if before:
                    before(state)
                return await generate(args, sample, dict(state.sampling_params))

            result = async_utils.run(run())
        GenerateState.clear_instances()
        return result, SimpleNamespace(seen=model.seen, requests=model.requests, tokenizer=tokenizer)

    yield one
    if Environments in type(Environments)._instances:
        for process in Environments(None, None).processes:
            async_utils.run(process.end())
    Environments.clear_instances()


def trained(sample, tokenizer) -> str:
    ids = sample.tokens[-sample.response_length :]
    return tokenizer.decode([token for token, bit in zip(ids, sample.loss_mask, strict=True) if bit])


def test_the_environment_answers_as_the_user_and_gives_the_reward(play):
    sample, model = play(["one", "two"])
    assert "<|im_start|>user\none!<|im_end|>" in model.seen(1)
    assert trained(sample, model.tokenizer) == "one<|im_end|>two<|im_end|>"
    assert (sample.status, sample.end_reason, sample.reward, sample.reward_is_trusted) == (
        Status.COMPLETED,
        "done",
        2.0,
        True,
    )
    assert sample.metadata["environment"] == {"task": 1, "metrics": {"steps": 2}}
    assert sample.metadata["template_drift"] == 0


def test_calls_reach_the_environment_parsed(play):
    _, model = play(['<tool_call>{"name": "add", "arguments": {}}</tool_call>', "two"])
    assert "['add']!" in model.seen(1)


def test_limits_of_turns_and_tokens_are_the_policys_and_are_scored(play):
    sample, _ = play(["one"], flags={"max_turns": 1})
    assert (sample.status, sample.end_reason, sample.reward) == (Status.TRUNCATED, "max_turns", 1.0)
    sample, _ = play([("one", "length")])
    assert (sample.status, sample.end_reason, sample.reward, sample.reward_is_trusted) == (
        Status.TRUNCATED,
        "length",
        0.0,
        True,
    )


def test_a_reward_key_gets_the_reward(play):
    sample, _ = play(["one", "two"], flags={"reward_key": "score"})
    assert sample.reward == {"score": 2.0}
    sample, _ = play(["one", "two"], flags={"reward_key": "score", "eval_reward_key": "acc"})
    assert sample.reward == {"score": 2.0, "acc": 2.0}, "an evaluation reads the other"


@pytest.mark.parametrize(
    ("reply", "limits", "why"),
    [
        ("raise", {}, "the environment raised SystemExit: no"),
        ("hang", {"step_timeout_s": 0.5}, "the environment took more than 0.5 s"),
        ("die", {}, "is gone"),
    ],
)
def test_what_the_environment_does_wrong_trains_nothing(play, reply, limits, why):
    sample, _ = play(["one", reply], **limits)
    assert (sample.end_reason, sample.reward_is_trusted, sample.reward, sample.remove_sample) == (
        "env_error",
        False,
        0.0,
        True,
    )
    assert why in sample.metadata["environment"]["error"]
    assert sample.loss_mask == [0] * sample.response_length
    assert len(sample.rollout_log_probs) == sample.response_length


def test_a_reward_that_is_no_number_is_an_error_of_the_environment(play):
    sample, _ = play(["one"], arguments={"steps": 1})
    assert (sample.end_reason, sample.reward) == ("env_error", 0.0)
    assert "the reward nan" in sample.metadata["environment"]["error"]


def test_an_episode_that_never_began_is_a_sample_that_trains_nothing(play):
    sample, model = play([], task=9)
    assert "there is no task 9" in sample.metadata["environment"]["error"]
    assert (sample.response_length, sample.loss_mask, sample.end_reason) == (1, [0], "env_error")
    assert not model.requests


def test_a_process_that_died_is_started_again_as_often_as_allowed(play):
    play(["die"], max_restarts=1)
    first = Environments(None, None).processes[0]._process.pid
    sample, _ = play(["one", "two"])
    assert sample.end_reason == "done"
    assert Environments(None, None).processes[0]._process.pid != first
    play(["die"])
    with pytest.raises(RuntimeError, match=r"ended \(exit code 9\), and max_restarts are used up. The end of .*log"):
        play(["one"])


def test_a_process_that_does_not_answer_is_ended(play, settings, monkeypatch):
    play(["one", "two"])
    process = Environments(None, None).processes[0]._process
    os.kill(process.pid, signal.SIGSTOP)
    with monkeypatch.context() as short:  # only for the process that is stopped: a busy machine slows the others
        short.setattr("slime_plugins.environments.process.MARGIN_S", 0.5 - read_settings(settings).step_timeout_s)
        short.setattr("slime_plugins.environments.process._HEALTH_S", 0.2)
        sample, _ = play(["one", "two"])
    assert (sample.end_reason, process.poll() is not None) == ("env_error", True)
    sample, _ = play(["one", "two"])
    assert sample.end_reason == "done"


def test_a_rollout_that_ends_gives_the_sample_back_as_it_was(play):
    sample, _ = play(["one", "two"], before=lambda state: setattr(state, "aborted", True))
    assert (sample.status, sample.end_reason, sample.response_length, sample.reward) == (
        Status.ABORTED,
        "aborted",
        0,
        None,
    )
    assert sample.metadata == {"environment": {"task": 1}}


def test_episodes_wait_for_a_place_in_a_process(play, monkeypatch):
    play(["one", "two"], max_episodes=1, processes=2)
    environments, most = Environments(None, None), []

    async def hold():
        async with environments.place() as process:
            most.append(sum(each.in_use for each in environments.processes))
            assert process.in_use == 1
            await asyncio.sleep(0.02)

    async def many():
        await asyncio.gather(*(hold() for _ in range(6)))

    async_utils.run(many())
    assert max(most) == 2


def test_a_prompt_that_is_not_the_datas_is_taken_with_a_warning(play, caplog):
    sample, model = play(["one", "two"], prompt="something else")
    assert "say 1" in model.seen(0)
    assert sample.prompt == [{"role": "user", "content": "say 1"}]
    assert "the environment begins task 1 otherwise than the data's row" in caplog.text


def test_a_row_without_a_task_is_refused(play):
    with pytest.raises(ValueError, match=r"has no metadata\['environment'\]\['task'\]"):
        play([], task="1")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"framework": "gym"}, "environment.framework of --custom-config-path: Input should be 'reasoning_gym'"),
        ({"pyton": "x"}, "environment.pyton of --custom-config-path: Extra inputs are not permitted, not 'x'"),
        ({"processes": 0}, "environment.processes of --custom-config-path"),
        ({"python": "/no/python"}, "there is no program /no/python; tools/prepare_environment.py makes"),
        ({"name": "nothing:Echo"}, "cannot be loaded: ModuleNotFoundError: No module named 'nothing'"),
        ({"name": "echo:Ech"}, "cannot be loaded: ValueError: the module echo has no Ech"),
        ({"name": "echo"}, "names no class; write module:Class"),
        ({"arguments": {"fail": "no license"}}, "cannot be loaded: RuntimeError: no license"),
        ({"framework": "verifiers"}, f"{sys.executable} has no verifiers; tools/prepare_environment.py makes"),
        ({"python": "true"}, "cannot be loaded"),
    ],
)
def test_a_setting_that_cannot_work_is_one_sentence_before_the_run(settings, changes, sentence):
    (found,) = check_args(rollout_args_with(settings | changes))
    assert sentence in found


def rollout_args_with(environment):
    args = rollout_args()
    vars(args)["environment"] = environment
    return args


def test_a_run_without_the_key_is_told_so():
    (found,) = check_args(rollout_args())
    assert found.startswith("slime_plugins.environments.generate needs the key environment in the file of")


def test_a_good_environment_is_loaded_before_the_run_and_says_what_it_is(settings):
    assert list(check_args(rollout_args_with(settings))) == []
    assert probe(read_settings(settings))["num_tasks"] == 3


def test_an_environment_that_loads_for_ever_is_given_up(settings, tmp_path):
    (tmp_path / "echo.py").write_text("import time\ntime.sleep(60)")
    with pytest.raises(UsageError, match=r"was not loaded within start_timeout_s \(0.5 s\)"):
        probe(read_settings(settings | {"start_timeout_s": 0.5}))
