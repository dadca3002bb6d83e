"""Harnesses in real local sandboxes: what they write, start and pass on, and the scripted agent's whole conversation.

`claude` and `codex` are scripts here that keep what they were started with; test_agent_harness_clis.py runs the real
ones.
"""

from __future__ import annotations

import argparse
import asyncio
import lzma
import tarfile
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from slime.agent.harness import HARNESSES, BaseHarness, HarnessContext, base, make_harness, scripted_agent
from slime.agent.harness.common import install_node22, install_npm_cli, run_agent
from slime.agent.sandbox import EXIT_TIME_BUDGET_EXCEEDED, GatewayAccess, LocalSandbox, Sandbox, SandboxError, results
from slime.utils.errors import UsageError
from slime.utils.types import Sample
from tests.rollout.chat_tokenizers import family_tokenizer
from tests.unit.agent_fakes import finish, gateway

T = TypeVar("T")
URL = "http://127.0.0.1:8000"
KEEP = '#!/bin/sh\nprintf "%s\\n" "$@" > /workspace/argv; env -0 > /workspace/env\n'


class Recording(LocalSandbox):
    """A local sandbox that keeps the command lines it was given, and their environments."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: list[str] = []
        self.environments: list[Any] = []

    async def exec(self, cmd: str, **kwargs: Any) -> Any:
        self.commands.append(cmd)
        self.environments.append(kwargs.get("env"))
        return await super().exec(cmd, **kwargs)


def inside(use: Callable[[Recording], Awaitable[T]], **options: Any) -> T:
    async def run() -> T:
        async with Recording(**options) as sandbox:
            return await use(sandbox)

    return asyncio.run(run())


def program(folder: Path, name: str, text: str = KEEP) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def started(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: str = "solve it"
) -> tuple[Recording, list[str], dict[str, str], str]:
    """(sandbox, arguments, environment, configuration) of a harness whose program keeps what it was started with."""
    harness = make_harness(name)
    program(tmp_path / "bin", harness.command)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    async def use(sandbox: Recording) -> tuple[Recording, list[str], dict[str, str], str]:
        await harness.install_cli(sandbox)
        code = await harness.run(
            sandbox, workdir="/workspace", session_id="key", adapter_url=URL, time_budget_sec=60, prompt=prompt
        )
        assert code == 0
        environment = dict(
            line.split("=", 1) for line in (await sandbox.read_file("/workspace/env")).split("\0") if line
        )
        files = "cat .claude/settings.json .claude.json .codex/config.toml .config/opencode/opencode.json 2> /dev/null"
        _, configuration, _ = await sandbox.exec(f"cd; {files}", user="agent")
        return sandbox, (await sandbox.read_file("/workspace/argv")).splitlines(), environment, configuration

    return inside(use, show=harness.shown_paths())


# ---- contract 1.9, test_harness ----


@pytest.mark.parametrize("code", [0, 7])
def test_run_agent_returns_the_exit_code_and_passes_the_environment_on_unchanged(code: int) -> None:
    env = {"A": "1", "B": "two words"}

    async def use(sandbox: Recording) -> None:
        command = f'echo "$A $B $HOME"; exit {code}'
        assert await run_agent(sandbox, workdir="/workspace", start_cmd=command, env=env, time_budget_sec=60) == code
        assert await sandbox.read_file("/workspace/.harness/trajectory.jsonl") == "1 two words /home/agent\n"
        assert "echo $? > " in await sandbox.read_file("/tmp/.run.sh")
        [at] = [i for i, text in enumerate(sandbox.commands) if "setsid" in text]
        assert sandbox.environments[at] == env
        # The output of the harness is no part of what the agent did.
        await sandbox.exec("git init -q . && git add -A", check=True)
        assert (await sandbox.exec("git status --short"))[1] == ""

    inside(use)


def test_run_agent_without_a_budget_kills_the_program() -> None:
    async def use(sandbox: Recording) -> None:
        code = await run_agent(sandbox, workdir="/workspace", start_cmd="sleep 77", env={}, time_budget_sec=0)
        assert code == EXIT_TIME_BUDGET_EXCEEDED
        gone = (
            "for _ in $(seq 100); do grep -ql '^sleep.77' -a /proc/[0-9]*/cmdline || exit 0; sleep 0.02; done; exit 1"
        )
        assert (await sandbox.exec(gone))[0] == 0

    inside(use)


def test_claude_code_is_started_with_the_session_as_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox, argv, env, configuration = started("claude_code", tmp_path, monkeypatch)
    assert argv[:4] == ["-p", "solve it", "--permission-mode", "bypassPermissions"]
    assert argv[4:6] == ["--output-format", "stream-json"]
    assert (
        '"hasCompletedOnboarding": true' in configuration and '"bypassPermissionsModeAccepted": true' in configuration
    )
    expected = {
        "ANTHROPIC_BASE_URL": URL,
        "ANTHROPIC_AUTH_TOKEN": "key",
        "ANTHROPIC_MODEL": "slime-actor",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    assert expected.items() <= env.items()
    whole = "\n".join(sandbox.commands)
    assert -1 < whole.index("useradd") < whole.index("settings.json") < whole.index("setsid")


def test_codex_is_told_our_server_and_that_it_may_edit_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox, argv, env, configuration = started("codex", tmp_path, monkeypatch)
    assert argv[:3] == ["exec", "--skip-git-repo-check", "solve it"]
    settings = tomllib.loads(configuration)
    assert (settings["model"], settings["model_provider"]) == ("slime-actor", "slime")
    assert settings["sandbox_mode"] == "danger-full-access"
    provider = settings["model_providers"]["slime"]
    # Codex has removed the wire "chat" of the contract.
    expected = {"base_url": f"{URL}/v1", "env_key": "OPENAI_API_KEY", "wire_api": "responses", "name": "slime"}
    assert provider == expected
    assert any("echo " in text and " | base64 -d" in text for text in sandbox.commands)
    assert (env["OPENAI_API_KEY"], env["OPENAI_BASE_URL"]) == ("key", f"{URL}/v1")


def test_extra_arguments_and_variables_come_last_and_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ARGS", "--tools Bash")
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ENVS", '{"ANTHROPIC_MODEL": "mine"}')
    _, argv, env, _ = started("claude_code", tmp_path, monkeypatch, prompt="- a list's item\n$HOME")
    assert argv[-2:] == ["--tools", "Bash"] and env["ANTHROPIC_MODEL"] == "mine"
    assert argv[1:4] == ["", "- a list's item", "$HOME"]  # a line before it: no option begins with one
    for text in ("{", "[1]", '{"A": 1}'):
        monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ENVS", text)
        with pytest.raises(UsageError, match="SLIME_AGENT_CC_EXTRA_ENVS=.*a JSON object of texts is needed"):
            make_harness("claude_code").with_extra_envs({})
    with pytest.raises(ValueError, match="a prompt of 200000 bytes is too long for a command line"):
        base.prompt_argument("x" * 200_000)


# ---- the scripted agent ----


def call(name: str, **arguments: str) -> str:
    parameters = "".join(f"<parameter={key}>{value}</parameter>" for key, value in arguments.items())
    return f"<tool_call><function={name}>{parameters}</function></tool_call>"


def scripted_run(
    texts: list[str], monkeypatch: pytest.MonkeyPatch, options: str, *, key: str = ""
) -> tuple[int, list[Sample], Any, str]:
    """(exit code, samples, the engine, the work directory's files and the trajectory) of the scripted harness."""
    monkeypatch.setenv("SLIME_AGENT_SCRIPTED_EXTRA_ARGS", options)
    harness = make_harness("scripted")
    texts = [f"{text}<|im_end|>" for text in texts]
    with gateway(texts, tokenizer=family_tokenizer("qwen3")) as (server, engine):
        session = server.open_session(sampling={"temperature": 1.0})

        async def use(sandbox: Recording) -> tuple[int, str]:
            await harness.install_cli(sandbox)
            where = sandbox.gateway.inside_url if sandbox.gateway else ""
            task = {"session_id": key or session, "adapter_url": where, "time_budget_sec": 120, "prompt": "Compute."}
            code = await harness.run(sandbox, workdir="/workspace", **task)
            _, text, _ = await sandbox.exec("head -c 4000 *.txt; cat .harness/trajectory.jsonl")
            return code, text

        code, text = inside(use, gateway=GatewayAccess(server.url, session), show=harness.shown_paths())
        return code, finish(server, session), engine, text


@pytest.mark.parametrize("protocol", list(scripted_agent.PROTOCOLS))
def test_the_scripted_agent_changes_files_and_its_conversation_is_one_sample(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [
        call("shell", command="echo $((12 * 12)) > answer.txt; cat answer.txt"),
        call("write_file", path="b.txt", content="two"),
        "The answer is 144.",
    ]
    code, [sample], engine, files = scripted_run(texts, monkeypatch, f"--protocol {protocol}")
    assert code == 0 and "144\n" in files and "two" in files
    assert (sample.metadata["agent"]["breaks"], sample.metadata["agent"]["turns"]) == (0, 3)
    assert sum(sample.loss_mask or []) == sum(map(len, engine.outputs))
    # The command's output is what the model read before its second answer.
    read = engine.tokenizer.decode(engine.requests[1]["input_ids"])
    assert "144" in read.rpartition(texts[0])[2] and "Compute." in read


def test_the_scripted_agents_exit_code_says_why_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    again = [call("shell", command="true"), call("no_tool", a="b")]
    code, _, engine, text = scripted_run(again[:1] * 2, monkeypatch, "--max-turns 2")
    assert code == 3 and len(engine.requests) == 2
    code, samples, engine, text = scripted_run(["x"], monkeypatch, "", key="of another session")
    assert (code, samples, engine.requests) == (1, [], []) and '"error": 401' in text


def test_the_scripted_agent_tells_the_model_what_went_wrong(tmp_path: Path) -> None:
    options = argparse.Namespace(tool_timeout=0.2, max_output=10)

    def tool(name: str, **arguments: Any) -> str:
        return scripted_agent.run_tool(name, arguments, options, scripted_agent.Remote(""))

    assert tool("bash") == "error: there is no tool 'bash', only shell, write_file"
    assert tool("shell", command=1) == "error: shell needs the text 'command'"
    assert tool("shell", command="echo no >&2; exit 3") == "no\n\n(exit code 3)"
    assert "timed out after 0.2 seconds" in tool("shell", command="sleep 5")
    assert tool("shell", command="printf 123456789012345") == "12345\n... cut ...\n12345"
    assert "Is a directory" in tool("write_file", path=str(tmp_path), content="")


# ---- names ----


class Own(BaseHarness):
    """A harness of a user's."""

    name, command, env_prefix = "own", "own", "OWN"

    async def install_cli(self, sb: Sandbox) -> None:
        """Need nothing."""

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write nothing."""

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Start nothing."""
        return 5


def test_a_harness_has_a_name_or_is_a_class_of_the_users() -> None:
    for name in HARNESSES:
        assert make_harness(name).name == name and make_harness(name) is make_harness(name)
    assert isinstance(make_harness(f"{__name__}:Own"), Own)
    with pytest.raises(
        UsageError, match="is called 'codec'.*codex.*claude_code, codex, mini_swe_agent, opencode, scr"
    ):
        make_harness("codec")
    with pytest.raises(UsageError, match="was found, but it has no attribute 'Missing'"):
        make_harness(f"{__name__}:Missing")
    with pytest.raises(UsageError, match="is not a subclass of slime.agent.harness.BaseHarness"):
        make_harness(f"{__name__}:Recording")


# ---- where programs come from ----


@pytest.mark.parametrize("name", sorted(set(HARNESSES) - {"scripted"}))
def test_a_program_that_nobody_has_is_named_with_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    harness = make_harness(name)
    assert harness.shown_paths() == ()
    with pytest.raises(RuntimeError, match=f"has no program '{harness.command}'.*install.*shown_paths"):
        inside(harness.install_cli)


def test_a_program_consists_of_its_packages_its_environment_or_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, node = program(tmp_path / "plain", "one"), program(tmp_path / "node", "node")
    script = program(tmp_path / "lib/node_modules/@x/two/bin", "two.js", "#!/usr/bin/env node\n")
    three = program(tmp_path / "env/bin", "three", f"#!{tmp_path}/env/bin/python\n")
    real_python = program(tmp_path / "python/bin", "python3.12")
    (three.parent / "python").symlink_to(real_python)
    (tmp_path / "env/pyvenv.cfg").touch()
    links = tmp_path / "bin"
    links.mkdir()
    for name, target in {"one": plain, "node": node, "two": script, "three": three, "python": real_python}.items():
        (links / name).symlink_to(target)
    monkeypatch.setenv("PATH", str(links))
    assert base.host_paths("one") == (str(plain),)
    assert base.host_paths("two") == (f"{tmp_path}/lib/node_modules", str(node))
    assert base.host_paths("three") == (f"{tmp_path}/env", f"{tmp_path}/python")
    assert base.host_paths("python") == (f"{tmp_path}/python",)


def test_a_script_of_this_host_finds_its_interpreter_in_the_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "bin", "my-shell", '#!/bin/bash\n. "$1"; shown "$2"\n')
    package = tmp_path / "lib/node_modules/x"
    script = program(package, "run.js", "#!/usr/bin/env my-shell\nshown() { echo shown $1; }\n")
    (tmp_path / "bin/x-cli").symlink_to(script)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    async def use(sandbox: Recording) -> None:
        await base.provide(sandbox, "x-cli", remedy="")
        run = {"workdir": "/workspace", "env": {}, "time_budget_sec": 60}
        assert await run_agent(sandbox, start_cmd="x-cli 12", **run) == 0
        assert await sandbox.read_file("/workspace/.harness/trajectory.jsonl") == "shown 12\n"
        assert (await sandbox.exec(f"echo > {script}"))[0], "what is shown below /tmp is read-only, too"

    inside(use, show=base.host_paths("x-cli"))


class Image:
    """A sandbox with a /usr/local that can be written: keeps what it was given; `failures` are those of npm."""

    sandbox_id = "image"

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.commands = failures, []
        self.files: dict[str, bytes] = {}

    async def exec(self, cmd: str, **kwargs: Any) -> tuple[int, str, str]:
        self.commands.append(cmd)
        if "npm install" not in cmd or not self.failures:
            return int("command -v" in cmd or ".local/bin" in cmd), "", ""
        self.failures -= 1
        raise SandboxError("no registry")

    async def write_file(self, path: str, data: Path, **kwargs: Any) -> None:
        self.files[path] = data.read_bytes()


@pytest.fixture
def tarballs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Node as `.tar.xz`, and an npm package."""
    program(tmp_path / "node-v22/bin", "node")
    with tarfile.open(tmp_path / "node.tar", "w") as tar:
        tar.add(tmp_path / "node-v22", "node-v22")
    node, package = tmp_path / "node.tar.xz", tmp_path / "cc.tgz"
    node.write_bytes(lzma.compress((tmp_path / "node.tar").read_bytes()))
    package.write_bytes(b"package")
    monkeypatch.setenv("SLIME_AGENT_NODE_TARBALL", str(node))
    monkeypatch.setenv("SLIME_AGENT_CC_TARBALL", str(package))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(results.random, "uniform", lambda low, high: low)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(base.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return node, package


def test_a_program_is_installed_from_tarballs_where_the_sandbox_has_none(
    tarballs: tuple[Path, Path], tmp_path: Path
) -> None:
    image: Any = Image(failures=2)
    asyncio.run(make_harness("claude_code").install_cli(image))
    assert image.files == {
        "/tmp/node.tar": (tmp_path / "node.tar").read_bytes(),
        "/tmp/harness-cli.tgz": b"package",
    }
    install = "npm install -g --prefix=/usr/local --no-audit --no-fund /tmp/harness-cli.tgz && claude --version"
    assert image.commands.count(install) == 3 and "/opt/node22" in image.commands[-4]
    [kept] = (tmp_path / "tmp").iterdir()
    before = kept.stat().st_mtime_ns
    asyncio.run(install_node22(image, tarballs[0]))
    assert [path.stat().st_mtime_ns for path in (tmp_path / "tmp").iterdir()] == [before], "unpacked once"


def test_an_install_that_cannot_work_says_why(tarballs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    image: Any = Image(failures=9)
    node, package = tarballs
    with pytest.raises(RuntimeError, match="cc.tgz was not installed in the sandbox in 3 tries: no registry"):
        asyncio.run(install_npm_cli(image, node_runtime=node, npm_package=package, check_cmd="true"))
    with pytest.raises(RuntimeError, match="/usr/local of the sandbox local-.* is read-only, cc.tgz cannot be"):
        inside(make_harness("claude_code").install_cli)
    monkeypatch.delenv("SLIME_AGENT_NODE_TARBALL")
    with pytest.raises(RuntimeError, match="SLIME_AGENT_NODE_TARBALL=: the path of a tarball on this host is needed"):
        asyncio.run(make_harness("claude_code").install_cli(image))
