"""Grading what an agent did: in a clean sandbox, with the original tests, after everything of the agent has ended.

1. `take_diff` kills the agent's processes, then asks git for what changed: nothing changes files meanwhile or later.
2. `grade_tests` runs in *another* sandbox, whose time the agent's budget does not touch. It applies the diff, puts the
   original tests back, and believes a report of every expected test, not an exit code: a program that calls
   `os._exit(0)` leaves no report.

What it cannot know: code under test runs in the process of its tests, and may look for the report and forge it. Where
that matters, write tests that start the program as a process of its own.
"""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Protocol

from slime.agent.sandbox import Sandbox
from slime.agent.sandbox.results import TMP, SandboxError, SandboxTimeout
from slime.utils.types import Sample

# What Python and pytest run or read by themselves, wherever it lies: an agent's are not taken over.
STARTUP_FILES = (
    "conftest.py",
    "sitecustomize.py",
    "usercustomize.py",
    "pytest.ini",
    ".pytest.ini",
    "tox.ini",
    "*.pth",
)
GRADERS = ("tests", "command")
WORKDIR = "/workspace"
# entry of a row's metadata, its type, what to call that
_ENTRIES: tuple[tuple[str, type, str], ...] = (
    *((name, str, "text") for name in ("problem_statement", "workdir", "image", "eval_cmd")),
    *((name, dict, "mapping from paths to texts") for name in ("files", "tests")),
    *((name, list, "list of texts") for name in ("pre_commands", "expected")),
)
PREPARE_S = 600.0
_IDENTITY = "-c user.name=slime -c user.email=slime@localhost"
_REPORTER = """
import json
_outcomes = {{}}
def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid] = report.outcome
def pytest_sessionfinish(session):
    with open({path!r}, "w") as file:
        json.dump(_outcomes, file)
"""


class GradingSandbox(Sandbox, Protocol):
    """What grading needs of a sandbox."""

    async def kill_all(self) -> None:
        """Kill what the agent has started."""


@dataclass(frozen=True)
class Task:
    """What an agent is asked to do, and how its work is graded: a row of the data.

    Attributes:
        prompt: `problem_statement` of the metadata, else what the row's prompt says.
        workdir: where it works, in the sandbox.
        image: of backends that have images.
        files: path below `workdir` -> text, written before it begins.
        pre_commands: run after that.
        tests: path below `workdir` -> text: the original tests, written when it has ended.
        expected: tests by pytest's names that must pass.
        eval_cmd: a command that succeeds where the work is good.
    """

    prompt: str
    workdir: str = WORKDIR
    image: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    pre_commands: Sequence[str] = ()
    tests: Mapping[str, str] = field(default_factory=dict)
    expected: Sequence[str] = ()
    eval_cmd: str | None = None

    @classmethod
    def of(cls, sample: Sample) -> Task:
        """The task of a row.

        Raises:
            ValueError: its metadata has an entry of another kind, with the entry's name.
        """
        metadata = sample.metadata
        for name, kind, what in _ENTRIES:
            if not isinstance(metadata.get(name, kind()), kind):
                raise ValueError(f"metadata[{name!r}] of sample {sample.index} is no {what}")
        for path in (*metadata.get("files", ()), *metadata.get("tests", ())):
            if path.startswith("/") or ".." in path.split("/"):
                raise ValueError(f"metadata of sample {sample.index}: {path!r} is no path below the work directory")
        known = {name: metadata[name] for name, _, _ in _ENTRIES if metadata.get(name)}
        prompt = known.pop("problem_statement", None) or _said(sample.prompt)
        return cls(prompt=prompt, **known)


def _said(prompt: str | list[dict[str, Any]]) -> str:
    """What a row's prompt says: the text, or what its user's messages say."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(str(message["content"]) for message in prompt if message["role"] != "assistant")


@dataclass(frozen=True)
class Grade:
    """The result of a grading.

    Attributes:
        solved: every expected test has passed.
        reason: "passed", or why not.
        outcomes: test -> "passed", "failed" or "skipped".
    """

    solved: bool
    reason: str
    outcomes: dict[str, str] = field(default_factory=dict)


async def prepare(sandbox: GradingSandbox, task: Task) -> str:
    """Make a task's work directory a git repository in which everything is committed; returns the commit.

    Raises:
        SandboxError: that failed.
    """
    at = shlex.quote(task.workdir)
    for path, text in task.files.items():
        await sandbox.write_file(str(PurePosixPath(task.workdir) / path), text)
    commands = [f"mkdir -p {at} && cd {at}", *(f"( {command}\n)" for command in task.pre_commands), "git init -q ."]
    commands += ["git add -A", f"git {_IDENTITY} commit -q --no-verify --allow-empty -m start", "git rev-parse HEAD"]
    _, commit, _ = await sandbox.exec(" && ".join(commands), timeout=PREPARE_S, check=True)
    return commit.split()[-1]


async def take_diff(sandbox: GradingSandbox, workdir: str, *, base: str = "HEAD", exclude: Sequence[str] = ()) -> str:
    """End the agent, then return the changes of its git repository as a patch; "" without any.

    Args:
        base: the commit that the agent began with.
        exclude: paths or patterns below `workdir` that are left out.

    Raises:
        SandboxError: there is no repository, or the patch is no text.
    """
    await sandbox.kill_all()
    left_out = " ".join(shlex.quote(f":(exclude,glob){pattern}") for pattern in exclude)
    path = f"{TMP}/.diff-{secrets.token_hex(8)}"
    # Settings of the agent's that would run a program or change the patch do not count.
    git = f"git -C {shlex.quote(workdir)} -c core.fsmonitor= -c core.hooksPath=/dev/null -c diff.noprefix=false"
    show = f"diff --no-ext-diff --no-textconv --binary {shlex.quote(base)} -- . {left_out}"
    await sandbox.exec(f"{git} add -N . && {git} {show} > {path}", check=True)
    return await sandbox.read_file(path)


async def grade_tests(
    sandbox: GradingSandbox,
    workdir: str,
    *,
    diff: str,
    originals: Mapping[str, str],
    expected: Sequence[str],
    python: str = "python3",
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
) -> Grade:
    """Run the tests on the repository in `workdir` of a clean sandbox, with the agent's changes.

    Args:
        diff: of `take_diff`.
        originals: path below `workdir` -> text: the tests and their settings, as the agent must not change them.
        expected: tests by pytest's names ("test_add.py::test_two") that must pass.
        python: a Python with pytest.
        env: more environment variables for the tests.
        timeout: seconds for the tests.

    Raises:
        SandboxError: the sandbox failed, which says nothing about the agent.
        ValueError: no test is expected.
    """
    if not expected:
        raise ValueError("grading without expected tests would pass everything; name the tests that must pass")
    if diff and not await _apply(sandbox, workdir, diff):
        return Grade(False, "the changes do not apply")
    for path, text in originals.items():
        await sandbox.write_file(str(PurePosixPath(workdir) / path), text)
    at = f"{TMP}/.grade-{secrets.token_hex(8)}"
    await sandbox.write_file(f"{at}/slime_reporter.py", _REPORTER.format(path=f"{at}/report.json"))
    # -P and -I are not possible: tests import the repository. The reporter's directory comes before it.
    command = (
        f"cd {shlex.quote(workdir)} && PYTHONPATH={at} PYTHONDONTWRITEBYTECODE=1 {shlex.quote(python)} -m pytest -q"
        f" -p slime_reporter -p no:cacheprovider {' '.join(map(shlex.quote, expected))}"
    )
    try:
        await sandbox.exec(command, env=env, timeout=timeout)
    except SandboxTimeout:
        return Grade(False, "timeout")
    await sandbox.kill_all()
    return await _judge(sandbox, f"{at}/report.json", expected)


async def grade_command(sandbox: GradingSandbox, workdir: str, *, diff: str, command: str, timeout: float) -> Grade:
    """Run a command on the repository in `workdir` of a clean sandbox, with the agent's changes: 0 is solved.

    A program that the agent has changed may forge an exit code; `grade_tests` asks for a report.

    Raises:
        SandboxError: the sandbox failed, which says nothing about the agent.
    """
    if diff and not await _apply(sandbox, workdir, diff):
        return Grade(False, "the changes do not apply")
    try:
        code, _, err = await sandbox.exec(f"cd {shlex.quote(workdir)} && {command}", timeout=timeout)
    except SandboxTimeout:
        return Grade(False, "timeout")
    return Grade(code == 0, f"exit code {code}: {err[-200:]}" if code else "passed")


async def _apply(sandbox: GradingSandbox, workdir: str, diff: str) -> bool:
    path = f"{TMP}/.patch-{secrets.token_hex(8)}"
    await sandbox.write_file(path, diff)
    left_out = " ".join(f"--exclude={shlex.quote(f'{at}{name}')}" for name in STARTUP_FILES for at in ("", "**/"))
    code, _, _ = await sandbox.exec(f"git -C {shlex.quote(workdir)} apply {left_out} {path}")
    return code == 0


async def _judge(sandbox: GradingSandbox, report: str, expected: Sequence[str]) -> Grade:
    try:
        outcomes = json.loads(await sandbox.read_file(report))
    except (SandboxError, ValueError):
        await sandbox.exec("true", check=True)  # raises where it was the sandbox that failed
        return Grade(False, "no report: the process of the tests ended before them")
    if not isinstance(outcomes, dict):
        return Grade(False, "no report of the tests")
    missed = [name for name in expected if outcomes.get(name) != "passed"]
    if missed:
        return Grade(False, f"{len(missed)} of {len(expected)} tests: {missed[0]} {outcomes.get(missed[0])}", outcomes)
    return Grade(True, "passed", outcomes)
