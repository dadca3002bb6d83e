"""slime.agent.generate: an agent edits in a sandbox, is graded in another, and every end has its reason."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from slime.agent import rollout, settings
from slime.agent.gateway import Gateway
from slime.agent.harness.programs import ScriptedHarness
from slime.agent.sandbox.grading import Task, grade_tests
from slime.agent.sandbox.local import LocalSandbox
from slime.agent.sandbox.results import SandboxError
from slime.rollout.sampling.scoring import restarted
from slime.utils.http_utils import post
from slime.utils.misc import SingletonMeta, load_function
from slime.utils.types import Sample
from tests.unit.agent_fakes import ScriptedEngine, served
from tools.make_tiny_model import build_tokenizer


class Nowhere(ScriptedHarness):
    """A harness whose program no host has."""

    command = "no-such-program"


TOKENIZER, END = build_tokenizer(), "<|im_end|>"
FIX = "sed -i s/a-b/a+b/ ops.py"
TEST = "from ops import add\n\ndef test_sum():\n    assert add(2, 3) == 5\n"
TASK = {
    "problem_statement": "add subtracts",
    "files": {"ops.py": "def add(a, b):\n    return a-b\n"},
    "tests": {"test_ops.py": TEST},
    "expected": ["test_ops.py::test_sum"],
    "instance_id": "add-1",
}
GRADED = {"harness": "scripted", "grader": {"kind": "tests", "python": sys.executable}}


def call(command: str) -> str:
    return f"<tool_call><function=shell><parameter=command>{command}</parameter></function></tool_call>"


def arguments(agent: Any, **changed: Any) -> Any:
    values = {
        **dict.fromkeys(("agent_harness", "max_turns", "rollout_max_context_len", "eval_max_context_len"), None),
        **dict.fromkeys(("reward_key", "eval_reward_key")),
        **{"sandbox_unsafe": False, "partial_rollout": False, "agent": agent},
    }
    return SimpleNamespace(**{**values, **changed})


@pytest.fixture
def execute(monkeypatch):
    """Runs `generate` on a sample with an engine that writes the given texts; returns what it returned."""
    state = SimpleNamespace(aborted=False)
    monkeypatch.setattr(rollout, "GenerateState", lambda args: state)
    SingletonMeta.clear_instances(rollout.Places)

    def execute(agent: Any, texts: list[str], *, metadata: Any = None, evaluation=False, abort_s=None, **changed: Any):
        engine = ScriptedEngine(TOKENIZER, [f"{text}{END}" for text in texts])
        with served(engine.app) as url:
            gateway = Gateway(tokenizer=TOKENIZER, sglang_url=url).start()

            async def shared(args: Any) -> Gateway:
                return gateway

            monkeypatch.setattr(rollout, "shared_gateway", shared)
            sample = Sample(index=3, group_index=1, prompt="fix it", metadata=dict(metadata or TASK))

            async def run() -> Any:
                if abort_s:
                    asyncio.get_running_loop().call_later(abort_s, setattr, state, "aborted", True)
                return await rollout.generate(arguments(agent, **changed), sample, {"max_new_tokens": 99}, evaluation)

            try:
                return asyncio.run(run())
            finally:
                gateway.stop()

    yield execute
    SingletonMeta.clear_instances(rollout.Places)


@pytest.fixture(scope="module", autouse=True)
def shows_this_python():
    GRADED["sandbox"] = {"options": {"show": sorted({sys.prefix, sys.base_prefix})}}


def test_the_path_of_the_issue_loads_the_function_and_its_check():
    assert load_function("slime.agent.generate") is rollout.generate
    assert load_function("slime.agent:generate").check_args is settings.check_args


def test_a_fix_is_graded_in_a_clean_sandbox_and_trains_the_tokens_of_the_engine(execute):
    sample = execute(GRADED, [call(FIX), "done"])
    assert (sample.reward, sample.end_reason, sample.reward_is_trusted) == (1.0, "done", True)
    assert sample.metadata["agent_grade"] == "passed" and sample.metadata["agent_exit_code"] == 0
    assert sample.metadata["instance_id"] == "add-1" and "files" not in sample.metadata
    ids = sample.tokens[-sample.response_length :]
    written = [token for token, bit in zip(ids, sample.loss_mask, strict=True) if bit]
    assert TOKENIZER.decode(written) == f"{call(FIX)}{END}done{END}"


def test_edited_tests_and_no_change_are_worth_nothing(execute):
    forged = execute(GRADED, [call("printf 'def test_sum():\\n  pass\\n' > test_ops.py"), "done"])
    assert forged.reward == 0.0 and "test_ops.py::test_sum failed" in forged.metadata["agent_grade"]
    passes = TASK | {"tests": {"test_ops.py": "def test_sum(): pass\n"}}  # with or without the agent
    idle = execute(GRADED, ["done"], metadata=passes)
    assert (idle.reward, idle.end_reason, idle.reward_is_trusted) == (0.0, "done", True)
    assert idle.metadata["agent_grade"] == "nothing was changed"
    wrecked = execute(GRADED, [call("rm -rf .git"), "done"])
    assert wrecked.reward == 0.0 and wrecked.reward_is_trusted, "the agent did that, not the sandbox"


def test_a_command_grades_and_its_exit_code_decides(execute):
    agent = {"harness": "scripted", "grader": "command"}
    for command, reward in (("grep -q a+b ops.py", 1.0), ("grep -q a-b ops.py", 0.0)):
        sample = execute(agent, [call(FIX), "done"], metadata=TASK | {"eval_cmd": command})
        assert sample.reward == reward, command


def test_a_sample_that_may_be_given_back_begins_anew_with_all_of_its_task(execute):
    sample = restarted(execute({"harness": "scripted"}, ["done"], partial_rollout=True))
    assert Task.of(sample) == Task.of(Sample(prompt="fix it", metadata=TASK))


def test_without_a_grader_the_reward_is_left_to_the_run(execute):
    assert execute({}, ["done"], agent_harness="scripted").reward is None


def test_an_agent_that_takes_too_long_is_killed_and_graded(execute):
    sample = execute(GRADED | {"budgets": {"seconds": 1.5}}, [call(f"{FIX}; sleep 60"), "done"])
    assert (sample.end_reason, sample.status, sample.reward) == ("budget", Sample.Status.TRUNCATED, 1.0)


def test_turns_end_at_their_budget(execute):
    sample = execute(GRADED, [call("true"), call(FIX), "done"], max_turns=1)
    assert (sample.end_reason, sample.status, sample.reward) == ("max_turns", Sample.Status.TRUNCATED, 0.0)


def test_a_sandbox_or_a_grader_that_fails_says_nothing_about_the_policy(execute, monkeypatch):
    broken = execute(GRADED, ["done"], metadata=TASK | {"pre_commands": ["exit 3"]})
    assert (broken.end_reason, broken.reward, broken.reward_is_trusted) == ("env_error", 0.0, False)
    assert broken.remove_sample and "exit code 3" in broken.metadata["agent_error"]

    async def fail(*args: Any, **kwargs: Any) -> Any:
        raise SandboxError("the host is gone")

    monkeypatch.setattr(rollout, "grade_tests", fail)
    ungraded = execute(GRADED, [call(FIX), "done"])
    assert (ungraded.end_reason, ungraded.reward, ungraded.reward_is_trusted) == ("grader_error", 0.0, False)
    assert ungraded.metadata["agent_error"] == "SandboxError: the host is gone" and any(ungraded.loss_mask)


def test_a_rollout_that_ends_ends_the_agent_and_gives_the_sample_back(execute):
    begin = time.monotonic()
    sample = execute(GRADED, [call("sleep 60"), "done"], abort_s=1.0)
    assert (sample.status, sample.end_reason) == (Sample.Status.ABORTED, "aborted")
    assert not sample.tokens and sample.metadata == TASK and time.monotonic() - begin < 20


PROGRAM = f"{__name__}:program"
SYNC_PROGRAM = f"{__name__}:sync_program"


async def program(base_url: str, api_key: str, sample: Sample) -> float | None:
    body = {"messages": [{"role": "user", "content": sample.prompt}]}
    headers = {"Authorization": f"Bearer {api_key}"}
    answer = await post(f"{base_url}/chat/completions", body, 0, headers=headers)
    text = answer["choices"][0]["message"]["content"]
    if text == "crash":
        raise KeyError("bug of the program")
    if text == "hang":
        await asyncio.sleep(60)
    return None if text == "unsure" else float(text)


def sync_program(base_url: str, api_key: str, sample: Sample) -> float:
    time.sleep(0.1)
    return asyncio.run(program(base_url, api_key, sample)) or 0.0


async def half(args: Any, sample: Sample, diff: str) -> float:
    assert diff == ""
    return 0.5


def fails(args: Any, sample: Sample, diff: str) -> float:
    raise OSError("the judge is down")


@pytest.mark.parametrize("path", [PROGRAM, SYNC_PROGRAM])
def test_a_program_of_the_user_needs_an_address_and_a_key(execute, path):
    sample = execute({"harness": path}, ["0.25"])
    assert (sample.reward, sample.end_reason) == (0.25, "done") and sample.response == f"0.25{END}"


def test_a_grader_of_the_user_scores_what_the_program_leaves_open(execute):
    graded = {"harness": PROGRAM, "grader": f"{__name__}:half"}
    assert execute(graded, ["unsure"]).reward == 0.5
    assert execute(graded, ["0.25"]).reward == 0.25, "the program's own reward wins"
    failed = execute({"harness": PROGRAM, "grader": f"{__name__}:fails"}, ["unsure"])
    assert (failed.end_reason, failed.reward_is_trusted) == ("grader_error", False)
    assert failed.metadata["agent_error"] == "OSError: the judge is down"


def test_a_program_that_hangs_is_cut_off_and_one_that_crashes_is_an_error(execute):
    sample = execute({"harness": PROGRAM, "budgets": {"seconds": 0.5}}, ["hang"])
    assert (sample.end_reason, sample.status) == ("budget", Sample.Status.TRUNCATED)
    with pytest.raises(KeyError, match="bug of the program"):
        execute({"harness": PROGRAM}, ["crash"])


def test_an_agent_that_never_calls_gives_a_sample_that_trains_nothing(execute):
    sample = execute({"harness": f"{__name__}:silent"}, [])
    assert sample.remove_sample and sample.loss_mask == [0] and not sample.reward_is_trusted
    assert sample.metadata["agent_error"].startswith("no turn of the agent's can be trained: it made none")


async def silent(base_url: str, api_key: str, sample: Sample) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("agent", "sentence"),
    [
        ({}, "needs an agent: --agent-harness, or harness under the key agent"),
        ("scripted", "--custom-config-path: agent: 'scripted' is no mapping; it needs keys of harness"),
        ({"harnes": "scripted"}, "--custom-config-path: agent.harnes: unknown key; did you mean harness"),
        ({"harness": f"{__name__}:Nowhere"}, "starts no-such-program, which is not on this host's PATH"),
        ({"harness": "skripted"}, "no agent harness is called 'skripted'"),
        ({"harness": "scripted", "budgets": {"turn": 1}}, "agent.budgets.turn: unknown key; did you mean turns"),
        ({"harness": "scripted", "budgets": {"turns": 0}}, "agent.budgets.turns: 0 must be >= 1"),
        ({"harness": "scripted", "budgets": {"seconds": -1}}, "agent.budgets.seconds: -1 must be > 0"),
        ({"harness": "scripted", "grader": {"kind": "tests", "python": ""}}, "agent.grader.python: '' "),
        (
            {"harness": "scripted", "sandbox": {"backend": "podman"}},
            "no sandbox backend podman; there is local, docker",
        ),
        (
            {"harness": "scripted", "sandbox": {"options": {"memory": 1}}},
            "sandbox.options of a local sandbox: .*memory",
        ),
        (
            {"harness": "scripted", "sandbox": {"options": {"memory_mb": 1}}},
            "memory_mb=1 of a local sandbox: at least",
        ),
        ({"harness": "scripted", "sandbox": {"backend": "docker"}}, "give sandbox.gateway_url"),
        ({"harness": "scripted", "grader": "test"}, "there is no grader test; there is tests, command"),
        ({"harness": "scripted", "grader": "nowhere:grade"}, "grader: .*nowhere"),
        ({"harness": "tests.unit.agent_fakes:served"}, "harness tests.unit.agent_fakes:served does not fit"),
        ({"harness": PROGRAM, "grader": "tests"}, "runs without one; return the reward"),
    ],
)
def test_a_wrong_setting_is_one_sentence_before_anything_starts(agent, sentence):
    problems = list(settings.check_args(arguments(agent)))
    assert len(problems) == 1
    with pytest.raises(ValueError, match=sentence), contextlib.ExitStack():
        raise ValueError(problems[0])


def test_flags_win_over_the_file():
    args = arguments({"harness": PROGRAM}, agent_harness="scripted", sandbox_unsafe=True, max_turns=4)
    found = settings.read_settings(args)
    assert found.harness == "scripted" and not found.is_program
    assert found.sandbox.options == {"unsafe": True} and found.budgets.turns == 4


def test_a_kernel_that_refuses_a_part_needs_sandbox_unsafe(execute, monkeypatch):
    accept = LocalSandbox._accept
    monkeypatch.setattr(
        LocalSandbox, "_accept", lambda self, message: accept(self, message | {"refused": ["landlock"]})
    )
    refused = execute({"harness": "scripted"}, ["done"])
    assert refused.end_reason == "env_error" and "--sandbox-unsafe" in refused.metadata["agent_error"]
    assert execute({"harness": "scripted"}, ["done"], sandbox_unsafe=True).end_reason == "done"


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"files": ["a"]}, r"metadata\['files'\] of sample 3 is no mapping"),
        ({"tests": {"../t.py": ""}}, "'../t.py' is no path below the work directory"),
        ({"expected": "test_a"}, r"metadata\['expected'\] of sample 3 is no list"),
    ],
)
def test_a_row_that_is_no_task_is_named(metadata, sentence):
    with pytest.raises(ValueError, match=sentence):
        Task.of(Sample(index=3, metadata=metadata))


def test_a_conversation_is_a_task_too():
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "fix it"}]
    assert Task.of(Sample(prompt=messages)).prompt == "be brief\n\nfix it"


def test_a_sandbox_that_ends_before_its_report_is_read_says_nothing_of_the_agent():
    class Ends:
        is_over = False

        async def exec(self, cmd: str, check: bool = False, **_: Any) -> tuple[int, str, str]:
            if self.is_over:
                raise SandboxError("the container is gone")
            return 0, "", ""

        async def write_file(self, *_: Any) -> None: ...

        async def kill_all(self) -> None:
            self.is_over = True

        async def read_file(self, path: str) -> str:
            raise SandboxError(f"no {path}")

    with pytest.raises(SandboxError, match="the container is gone"):
        asyncio.run(grade_tests(Ends(), "/w", diff="", originals={}, expected=["test_a.py::test_b"]))
