"""The real programs of the harnesses, in local sandboxes, offline, against our server and a scripted engine.

Slow: npm and pip install them (2 GB), and it skips where their registries are out of reach. SLIME_TEST_AGENT_CLIS
names a directory in which they are kept for the next time.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.agent.gateway import Gateway
from slime.agent.harness import make_harness
from slime.agent.mcp_endpoint import McpEndpoint
from slime.agent.sandbox import GatewayAccess, LocalSandbox
from slime.rollout.mcp_tools import McpTools
from slime.utils import async_utils
from tests.rollout.chat_tokenizers import family_tokenizer
from tests.rollout.test_mcp_tools import COMMAND
from tests.unit.agent_fakes import ScriptedEngine, finish, served
from tests.unit.rollout_fakes import rollout_args

NPM = ("@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.171.0", "opencode-ai@1.18.33")
PIP = "mini-swe-agent==2.4.6"
WRITE = "echo $((12 * 12)) > answer.txt; cat answer.txt"
SMALL = "--bare --system-prompt 'You work in a shell.' --tools Bash"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the installers take minutes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if kept := os.environ.get("SLIME_TEST_AGENT_CLIS"):
        yield Path(kept)
        return
    path = tmp_path_factory.mktemp("clis")
    yield path
    shutil.rmtree(path)


def install(what: str, argv: list[str]) -> None:
    """Run an installer; skip where it cannot."""
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{what} need {argv[0]}")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500)
    if done.returncode:
        pytest.skip(f"{what} cannot be installed here: {done.stderr[-300:]}")


@pytest.fixture(scope="module")
def npm_programs(folder: Path) -> Path:
    programs = folder / "node_modules/.bin"
    if not programs.exists():
        install("Claude Code, Codex and OpenCode", ["npm", "install", "--prefix", str(folder), *NPM])
    return programs


@pytest.fixture(scope="module")
def pip_programs(folder: Path) -> Path:
    programs = folder / "venv/bin"
    if not (programs / "mini").exists():
        install("mini-swe-agent's environments", [sys.executable, "-m", "venv", str(folder / "venv")])
        install("mini-swe-agent", [str(programs / "python"), "-m", "pip", "install", "-q", PIP])
    return programs


def call(name: str, /, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


async def work(name: str, url: str, key: str, memory_mb: int, *, offers_tools: bool) -> tuple[int, str, str]:
    """(exit code, the file that the model's command writes, the program's output)"""
    harness = make_harness(name)
    access = GatewayAccess(url, key)
    async with LocalSandbox(memory_mb=memory_mb, gateway=access, show=harness.shown_paths()) as sandbox:
        await harness.install_cli(sandbox)
        task: dict[str, Any] = {"session_id": key, "adapter_url": access.inside_url, "time_budget_sec": 120}
        task["offers_tools"] = offers_tools
        code = await harness.run(sandbox, workdir="/workspace", prompt="Write 12 * 12 to answer.txt.", **task)
        _, answer, _ = await sandbox.exec("cat answer.txt")
        return code, answer, await sandbox.read_file("/workspace/.harness/trajectory.jsonl")


def check(
    name: str, texts: list[str], *, streams: bool, memory_mb: int = 1024, mcp: McpEndpoint | None = None
) -> ScriptedEngine:
    """Have the program work; return the engine that it asked."""
    tokenizer = family_tokenizer("qwen3")
    types: list[str] = []

    async def keep_type(_: Any, response: Any) -> None:
        types.append(response.headers.get("Content-Type", ""))

    engine = ScriptedEngine(tokenizer, texts)
    with served(engine.app) as engine_url:
        server = Gateway(tokenizer=tokenizer, sglang_url=engine_url, tool_parser="qwen25", reasoning_parser="qwen3")
        server.app.on_response_prepare.append(keep_type)
        server.start().mcp = mcp
        try:
            key = server.open_session(sampling={"temperature": 1.0})
            code, answer, output = asyncio.run(work(name, server.url, key, memory_mb, offers_tools=mcp is not None))
            assert (code, answer) == (0, "144\n"), output[-3000:]
            samples = finish(server, key)
        finally:
            server.stop()
    [sample] = samples
    assert (sample.metadata["agent"]["turns"], sample.metadata["agent"]["breaks"]) == (len(texts), 0)
    assert sum(sample.loss_mask or []) == sum(map(len, engine.outputs)) and len(engine.requests) == len(texts)
    assert sample.metadata.get("mcp_calls") == ({"loud": 1} if mcp else None)
    assert "144" in tokenizer.decode(engine.requests[1]["input_ids"]).rpartition(texts[0])[2]
    assert any("event-stream" in kind for kind in types) == streams
    return engine


@pytest.mark.parametrize(
    ("name", "tool", "argument", "memory_mb"),
    [
        ("claude_code", "Bash", "command", 1024),
        ("codex", "exec_command", "cmd", 512),
        ("opencode", "bash", "command", 1024),
    ],
)
def test_a_program_of_npm_changes_a_file_and_its_conversation_is_one_sample(
    name: str,
    tool: str,
    argument: str,
    memory_mb: int,
    npm_programs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", f"{npm_programs}:{os.environ['PATH']}")
    texts = [call(tool, **{argument: WRITE, "description": "compute"}), "The answer is 144.<|im_end|>"]
    check(name, texts, streams=True, memory_mb=memory_mb)


@pytest.mark.parametrize(
    ("name", "tool", "argument", "mcp_tool"),
    [
        ("claude_code", "Bash", "command", "mcp__slime__environment"),
        ("codex", "exec_command", "cmd", "mcp__slime__environment"),
        ("opencode", "bash", "command", "slime_environment"),
    ],
)
def test_a_program_of_npm_calls_a_tool_of_the_runs_mcp_server(
    name: str, tool: str, argument: str, mcp_tool: str, npm_programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{npm_programs}:{os.environ['PATH']}")
    McpTools.clear_instances()
    args = rollout_args()
    args.mcp = [{"name": "loud", "command": COMMAND, "env": {"WORD": "xylophone"}}]
    texts = [call(tool, **{argument: WRITE, "description": "compute"}), call(mcp_tool, name="WORD"), "Done.<|im_end|>"]
    mcp = async_utils.run(McpEndpoint.of(args))
    assert mcp is not None
    try:
        engine = check(name, texts, streams=True, mcp=mcp)
    finally:
        async_utils.run(mcp.tools.close())
        McpTools.clear_instances()
    read = family_tokenizer("qwen3").decode(engine.requests[2]["input_ids"])
    assert "xylophone" in read.rpartition(texts[1])[2]


def test_claude_code_fits_a_small_model_with_one_tool(npm_programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{npm_programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ARGS", SMALL)
    texts = [call("Bash", command=WRITE), "The answer is 144.<|im_end|>"]
    engine = check("claude_code", texts, streams=True)
    assert len(engine.requests[0]["input_ids"]) < 2500


def test_mini_swe_agent_changes_a_file_and_its_conversation_is_one_sample(
    pip_programs: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/mini").unlink(missing_ok=True)
    (folder / "bin/mini").symlink_to(pip_programs / "mini")  # and not the environment's python
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    texts = [call("bash", command=WRITE), call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
    check("mini_swe_agent", texts, streams=False, memory_mb=512)
