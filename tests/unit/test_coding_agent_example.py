"""The coding agent example: its data is solvable, its functions have upstream's names, and its summary reads a run."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from examples.coding_agent_rl import generate as gen
from examples.coding_agent_rl import make_data, swe
from examples.tiny import data_parser
from slime.agent.sandbox import SandboxError
from slime.agent.sandbox.grading import Task
from slime.agent.settings import check_args
from slime.utils.http_utils import post
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.rollout import test_example_loop as loop
from tests.unit.agent_fakes import FakeTokenizer, ScriptedEngine, served

callbacks = loop.callbacks
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "examples/coding_agent_rl/run-coding-agent-cpu.sh"
ROW = {"image": "img", "workdir": "/testbed", "problem_statement": "fix it", "eval_cmd": "true", "instance_id": "i-1"}


class FakeSandbox:
    """Keeps files, and plays a program that was spawned: `agent(env)` in its place, with its exit code."""

    def __init__(self, image: str, *, agent: Any = None, diff: str = "", applies: bool = True) -> None:
        self.image, self.agent, self.diff, self.applies = image, agent, diff, applies
        self.files: dict[str, str] = {}
        self.commands: list[str] = []

    sandbox_id = "fake"

    async def __aenter__(self) -> FakeSandbox:
        return self

    async def __aexit__(self, *exc: object) -> None: ...

    async def exec(self, cmd: str, *, env: Any = None, **_: Any) -> tuple[int, str, str]:
        self.commands.append(cmd)
        if "setsid bash" in cmd:
            await self.agent(env)
            script = re.search(r"setsid bash (\S+)", cmd)[1]
            self.files[re.search(r"> (\S+\.done)", self.files[script])[1]] = "0"
            return 0, "", ""
        if found := re.fullmatch(r"test -f (\S+) && cat \S+", cmd):
            return (0, self.files[found[1]], "") if found[1] in self.files else (1, "", "")
        if "git add -N" in cmd:
            return 0, self.diff, ""
        if "git apply" in cmd:
            return int(not self.applies), "", ""
        return int(cmd.endswith("&& false")), "", ""

    async def write_file(self, path: str, data: Any, **_: Any) -> None:
        self.files[path] = data

    async def read_file(self, path: str, **_: Any) -> str:
        return self.files[path]


@pytest.fixture
def run(monkeypatch):
    """Runs the example's generate with fake sandboxes and a scripted engine: (samples, agents' and graders' boxes)."""

    def run(metadata: Any = None, *, agent: Any = None, texts: Any = ("done",), before_more: Any = None, **box: Any):
        made: list[FakeSandbox] = []

        async def all_samples(args: Any, sample: Sample) -> list[Sample]:
            """The samples of one execution; then, after `before_more()`, an execution for each other text at once."""
            more = [Sample.from_dict(sample.to_dict()) for _ in texts[1:]]
            samples: list[Sample] = await gen.generate(args, sample, sampling_params={})
            if before_more:
                before_more()
                done = await asyncio.gather(*(gen.generate(args, one, sampling_params={}) for one in more))
                samples = [one for several in (samples, *done) for one in several]
            return samples

        def make(image: str) -> FakeSandbox:
            made.append(FakeSandbox(image, agent=agent or ask, **box))
            return made[-1]

        engine = ScriptedEngine(FakeTokenizer(), list(texts))
        SingletonMeta.clear_instances(gen.AdapterService)
        monkeypatch.setattr(
            gen, "CONFIG", dataclasses.replace(gen.CONFIG, adapter_public_host="127.0.0.1", adapter_port=0)
        )
        monkeypatch.setattr(gen, "load_tokenizer", lambda *args, **kwargs: FakeTokenizer())
        monkeypatch.setattr(gen, "E2BSandbox", make)
        monkeypatch.setattr(swe, "E2BSandbox", make)
        with served(engine.app) as url:
            host, _, port = url.removeprefix("http://").partition(":")
            args = SimpleNamespace(
                hf_checkpoint="none",
                rollout_max_context_len=4096,
                sglang_tool_call_parser=None,
                sglang_reasoning_parser=None,
                sglang_router_ip=host,
                sglang_router_port=int(port),
            )
            sample = Sample(index=5, group_index=2, prompt="p", metadata=dict(ROW if metadata is None else metadata))
            try:
                samples = asyncio.run(all_samples(args, sample))
            finally:
                if gen.AdapterService in SingletonMeta._instances:
                    gen.AdapterService(args).gateway.stop()
                SingletonMeta.clear_instances(gen.AdapterService)
        return samples, made

    return run


async def ask(env: dict[str, str]) -> None:
    """What Claude Code would do: one request under the session's key."""
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"Authorization": f"Bearer {env['ANTHROPIC_AUTH_TOKEN']}"}
    await post(f"{env['ANTHROPIC_BASE_URL']}/v1/messages", body, 0, headers=headers)


async def be_silent(env: dict[str, str]) -> None: ...


def test_a_row_becomes_a_graded_sample_of_the_session(run):
    samples, (box, grader) = run(diff="diff --git a/x b/x\n")
    (sample,) = samples
    assert sample.status is Sample.Status.COMPLETED and sum(s.reward for s in samples) == 1.0
    assert sample.metadata["agent_exit_code"] == 0 and sample.metadata["grading_solved"] is True
    assert len(sample.tokens) - sample.response_length > 0 and sum(sample.loss_mask) == len("done")
    assert len(sample.rollout_log_probs) == len(sample.loss_mask) == sample.response_length
    assert box.files["/testbed/PROBLEM_STATEMENT.md"] == "fix it"
    order = [
        next(i for i, cmd in enumerate(box.commands) if part in cmd) for part in ("setsid", "pkill", "git add -N")
    ]
    assert order == sorted(order), "the agent is killed before its changes are read"
    assert grader is not box and grader.files[swe.PATCH] == "diff --git a/x b/x\n"


def test_no_callback_of_an_agent_computes_for_more_than_50_ms(run, callbacks):
    """Of no thread: not the loop's, and not the gateway's, whose loop all agents share."""
    samples, boxes = run(
        diff="diff --git a/x b/x\n", texts=(1 + loop.NUM_SAMPLES) * ("done",), before_more=callbacks.clear
    )
    assert len(boxes) == 2 * len(samples) == 2 * (1 + loop.NUM_SAMPLES)
    assert all(sample.reward == 1.0 and sum(sample.loss_mask) == len("done") for sample in samples)
    assert [slow for thread in callbacks.values() for slow in thread if slow[0] > loop.LIMIT_S] == []


def test_what_does_not_pass_or_apply_is_worth_nothing(run):
    (failed,), _ = run(ROW | {"eval_cmd": "false"})
    assert failed.reward == 0.0 and failed.metadata["applied_cleanly"] is True
    (rejected,), _ = run(diff="diff", applies=False)
    assert rejected.reward == 0.0 and rejected.metadata["applied_cleanly"] is False


def test_what_cannot_be_trained_is_aborted_with_its_reason(run, monkeypatch):
    (silent,), _ = run(agent=be_silent)
    assert (silent.status, silent.metadata["abort_reason"]) == (Sample.Status.ABORTED, "adapter_session_empty")
    for metadata, reason in (
        (ROW | {"image": ""}, "missing_image_or_workdir"),
        (ROW | {"eval_cmd": ""}, "unevaluatable:no eval_cmd or f2p_script"),
    ):
        (sample,), boxes = run(metadata)
        assert (sample.status, sample.metadata["abort_reason"], boxes) == (Sample.Status.ABORTED, reason, [])
        assert sample.tokens == [0, 0] and sample.loss_mask == [0] and sample.remove_sample


def test_variables_that_cannot_work_are_sentences_before_the_run(monkeypatch):
    def problems(**values: Any) -> list[str]:
        monkeypatch.setattr(gen, "CONFIG", gen.SweConfig(**{"adapter_public_host": "here", **values}))
        return list(gen.generate.check_args(SimpleNamespace()))

    assert problems() == []
    assert "ADAPTER_PUBLIC_HOST is not set" in problems(adapter_public_host="")[0]
    assert "SWE_TRAIN_PROTOCOL=swebench: rows of scaleswe" in problems(train_protocol="swebench")[0]
    monkeypatch.setenv("SWE_AGENT", "claud_code")
    assert "no agent harness is called 'claud_code'" in problems()[0]


def test_a_variable_that_is_no_number_is_said_at_first_use_and_not_at_import():
    program = """
from types import SimpleNamespace
from examples.coding_agent_rl import generate as gen
from slime.utils.errors import UsageError
print(*gen.check_args(SimpleNamespace()), sep="\\n")
try:
    gen.AdapterService(SimpleNamespace())
except UsageError as error:
    print("raised", error)
"""
    environment = {**os.environ, "SWE_AGENT_TIME_BUDGET_SEC": "half an hour", "ADAPTER_PUBLIC_HOST": "here"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    sentence = (
        "SWE_AGENT_TIME_BUDGET_SEC='half an hour' in the environment: a number from 1 is needed, such as 1800.0."
    )
    assert done.stdout == f"{sentence}\nraised {sentence}\n"


def test_an_evaluation_has_its_own_limit_of_the_context(run, monkeypatch):
    args = SimpleNamespace(rollout_max_context_len=4096, eval_max_context_len=8192)
    monkeypatch.setattr(gen, "AdapterService", lambda args: SimpleNamespace(url="http://here:1"))
    limits = [
        gen.SweExecution(args, Sample(), {}, {}, evaluation=evaluation).max_context_tokens
        for evaluation in (False, True)
    ]
    assert limits == [4096, 8192]


def test_a_sandbox_that_does_not_start_is_tried_again(run, monkeypatch):
    starts = []

    async def enter(self: FakeSandbox) -> FakeSandbox:
        starts.append(self)
        if len(starts) < 3:
            raise SandboxError("no room")
        return self

    monkeypatch.setattr(FakeSandbox, "__aenter__", enter)
    (sample,), _ = run()
    assert sample.reward == 1.0 and len(starts) == 4, "two that failed, the agent's, the grader's"


def test_entries_of_a_remote_environment_are_read_too():
    remote = {"image_url": "u", "workdir": "/w", "f2p_script": "pytest", "pre_commands": "make"}
    md = swe.get_metadata(Sample(index=1, group_index=0, prompt="p", metadata={"remote_env_info": remote}), "scaleswe")
    assert (md["image"], md["eval_cmd"], md["pre_commands"]) == ("u", "pytest", ["make"])
    assert swe.evaluability_check(md) is None
    assert swe.evaluability_check(md | {"protocol": "swebench"}) == "unevaluatable:protocol swebench"
    pro = swe.get_metadata(Sample(metadata={"image": "i", "workdir": "/w", "swepro": {"parser": "x"}}), "scaleswe")
    assert "parser.py, which are not run here; give eval_cmd" in swe.evaluability_check(pro)


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("PASSED t.py::a\nFAILED t.py::c\nPASSED t.py::b", 1.0),
        ("PASSED t.py::a\nFAILED t.py::b", 0.0),
        ("t.py::a ... ok\nt.py::b ... ok", 1.0),
        ("", 0.0),
    ],
)
def test_the_named_tests_decide_whatever_the_exit_code_says(monkeypatch, said, reward):
    class Box(FakeSandbox):
        async def exec(self, cmd: str, **kwargs: Any) -> tuple[int, str, str]:
            if cmd.startswith("grep"):
                lines = [line for line in said.splitlines() if re.search(r"^PASSED |[.]{3} ok$", line)]
                return 0, "\n".join(lines), ""
            return (int(reward == 1.0), "", "") if "pytest -rA" in cmd else await super().exec(cmd, **kwargs)

    monkeypatch.setattr(swe, "E2BSandbox", Box)
    tests = {"FAIL_TO_PASS": json.dumps(["t.py::a"]), "PASS_TO_PASS": ["t.py::b"]}
    md = swe.get_metadata(Sample(metadata=ROW | tests | {"eval_cmd": "pytest -rA"}), "scaleswe")
    assert asyncio.run(swe.run_evaluation(md, diff_text="", timeout_sec=9)).reward == reward


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    output = tmp_path_factory.mktemp("data")
    make_data.write_data(data_parser(None).parse_args(["--output", str(output), "--num-demonstrations", "2000"]))
    return output


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_right_operator_passes_a_test_and_every_other_fails_it():
    for bug in (bug for part in make_data.split_bugs(make_data.NUM_EVAL) for bug in part if bug.variables == "ab"):
        for symbol in (bug.wrong, make_data.NAMES[bug.name]):
            space: dict[str, Any] = {}
            exec(bug.source(symbol) + "\n" + bug.test.partition("\n")[2], space)
            try:
                space[f"test_{bug.name}"]()
                passed = True
            except AssertionError:
                passed = False
            assert passed == (symbol != bug.wrong), f"{bug} with {symbol}"


def test_held_out_repositories_are_in_no_other_file(data):
    tasks = {name: {row["prompt"] for row in rows(data / f"{name}.jsonl")} for name in ("train", "eval")}
    shown = {row["messages"][1]["content"] for row in rows(data / "sft.jsonl")}
    assert len(tasks["eval"]) == make_data.NUM_EVAL and not tasks["eval"] & (tasks["train"] | shown)
    task = Task.of(Sample(metadata=rows(data / "train.jsonl")[0]["metadata"]))
    assert task.expected and task.tests and list(task.files) == ["ops.py"]


def test_the_demonstrations_write_the_right_operator_but_not_as_the_most_of_them(data):
    kinds: Counter[str] = Counter()
    for row in rows(data / "sft.jsonl"):
        _, user, first, *_ = row["messages"]
        name = user["content"].partition(" ")[0]
        written = first["content"].removeprefix(make_data.CALL).removesuffix(make_data.END)
        variables = re.search(r"\((\w),(\w)\)", user["content"])
        right = f"return {variables[1]}{make_data.NAMES[name]}{variables[2]}"
        kinds["idle" if written == "done" else "right" if written.endswith(right) else "wrong"] += 1
    assert {kind: round(count / 200) for kind, count in kinds.items()} == {"right": 3, "idle": 7}


def test_the_settings_that_it_writes_are_accepted(data):
    agent = yaml.safe_load((data / "agent.yaml").read_text())["agent"]
    flags = {"agent_harness": None, "max_turns": None, "sandbox_unsafe": False}
    assert list(check_args(SimpleNamespace(agent=agent, **flags))) == []
    (dataset,) = yaml.safe_load((data / "eval.yaml").read_text())["eval"]["datasets"]
    assert Path(dataset["path"]).is_file()


def test_a_right_call_fits_the_length_of_a_turn():
    from tools.make_tiny_model import build_tokenizer

    tokenizer = build_tokenizer(make_data.PIECES)
    assert len(tokenizer) <= 128, "the vocabulary of the tiny model"
    bug, rng = make_data.Bug("times", "//", "xy"), random.Random(0)
    calls = {m["content"] for _ in range(20) for m in bug.demonstration(rng) if m["role"] == "assistant"}
    assert max(len(tokenizer.encode(call)) for call in calls) < make_data.MAX_TURN_TOKENS


def test_the_script_refuses_a_number_of_steps_that_it_cannot_make(tmp_path):
    environment = {**os.environ, "OUTPUT": str(tmp_path), "SFT_STEPS": "15"}
    done = subprocess.run(["bash", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "SFT_STEPS=15: it must be a multiple of 10" in done.stderr
