"""Tools of a real MCP server over stdio and over HTTP: bounded, and what goes wrong is said to the model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.config.mcp_servers import McpServer
from slime.processes.registry import registry
from slime.processes.wait import wait
from slime.rollout import mcp_tools
from slime.rollout.mcp_tools import McpTools
from slime.rollout.multi_turn import final_answer, generate, generate_turns
from slime.rollout.tool_calls import EnvError, ToolCall, call_tool, take_tool_timeouts
from slime.utils import async_utils
from slime.utils.errors import UsageError
from slime.utils.processing_utils import open_image
from slime.utils.types import Sample
from tests.rollout.test_multi_turn import call, run
from tests.unit.rollout_fakes import rollout_args

__all__ = ["run"]  # a fixture
SERVER = str(Path(__file__).with_name("mcp_server.py"))
COMMAND = [sys.executable, SERVER, "stdio"]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where a server listens for HTTP."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    with subprocess.Popen([sys.executable, SERVER, "http", str(number)]) as process:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", number)) == 0:
                    break
            time.sleep(0.05)
        yield number
        process.kill()


class Caller:
    """Makes calls of the servers of a run: (name, arguments) -> what the model reads."""

    def __init__(self, *servers: dict[str, Any]) -> None:
        McpTools.clear_instances()
        self.args = rollout_args()
        self.args.mcp = [{"timeout_s": 30, **server} for server in servers]
        self.tools = McpTools(self.args)

    def __call__(
        self, *wanted: tuple[str, dict[str, Any]], sample: Sample | None = None, timeout_s: float | None = None
    ) -> list[str]:
        async def work() -> list[str]:
            await self.tools.of(self.args)
            known, answers = [schema["function"]["name"] for schema in self.tools.schemas], []
            for name, arguments in wanted:
                answers.append(
                    await call_tool(
                        self.tools.call,
                        self.args,
                        sample or Sample(),
                        ToolCall(name, arguments),
                        known=known,
                        timeout_s=timeout_s or self.tools.timeout_s("add"),
                    )
                )
            return [text for text, _ in answers]

        return async_utils.run(work())

    def lose(self) -> None:
        """End the connections; nothing answers at the addresses any more."""
        for client in self.tools.clients:
            client.server = client.server.model_copy(update={"url": "http://127.0.0.1:9/mcp"})
        async_utils.run(self.tools.close())

    def close(self) -> None:
        async_utils.run(self.tools.close())
        McpTools.clear_instances()


def servers() -> list[str]:
    """The MCP servers that run; an engine of the session may run, too."""
    return [name for name in registry().running() if name.startswith("MCP server")]


@pytest.fixture(scope="module")
def program() -> Iterator[Caller]:
    """One program, which a test may end: the next call starts it again."""
    os.environ |= {"MY_SECRET": "s3cret", "ELSEWHERE": "not for servers"}
    env = {"KEY": "$MY_SECRET", "PLAIN": "x"}
    caller = Caller({"name": "loud", "command": COMMAND, "env": env, "max_result_chars": 1000, "max_calls": 20})
    yield caller
    caller.close()
    assert servers() == []
    for name in ("MY_SECRET", "ELSEWHERE"):
        del os.environ[name]


ADD = ("add", {"a": 1, "b": 2})


def test_images_of_an_answer_are_parts_for_a_model_that_sees_them(program: Caller, monkeypatch: Any) -> None:
    assert program(("camera", {"letter": "a"})) == ["a\n[image image/png]"]
    monkeypatch.setattr(program.args, "multimodal_keys", {"image": "none"})
    [parts] = program(("camera", {"letter": "a"}))
    said, seen = parts  # type: ignore[misc]
    assert said == {"type": "text", "text": "a"}
    picture = open_image(seen["image"])  # type: ignore[index]
    assert picture.size == (48, 32) and picture.getpixel((0, 0)) == (255, 0, 0)


def test_one_program_answers_all_samples(program: Caller) -> None:
    first, second = program(ADD, ("add", {"a": 5, "b": 5}))
    assert (first, second) == ("3 after 1 calls", "10 after 2 calls")
    assert program(ADD, sample=Sample()) == ["3 after 3 calls"], "its memory is shared"
    assert servers() == ["MCP server loud"]


def test_what_the_model_got_wrong_is_told(program: Caller) -> None:
    refused, wrong, unknown = program(("refuse", {}), ("add", {"a": "x", "b": 1}), ("subtract", {}))
    assert refused == "error: Error executing tool refuse: not today"
    assert wrong.startswith("error: Error executing tool add: 1 validation error")
    assert unknown.startswith("error: no tool subtract; there is add, refuse")


def test_an_answer_is_cut_and_lines_that_are_no_messages_are_passed_over(program: Caller) -> None:
    cut, good = program(("big", {"megabytes": 1}), ("garbage", {}))
    assert cut == "x" * 1000 + f"\n[cut: the first 1000 of {1 << 20} characters]" and good == "good"


def test_a_secret_is_read_from_the_environment_of_which_the_program_sees_no_more(program: Caller) -> None:
    asked = [("environment", {"name": name}) for name in ("KEY", "PLAIN", "ELSEWHERE", "MY_SECRET")]
    assert program(*asked) == ["s3cret", "x", "none", "none"]


def test_a_sample_has_so_many_calls(program: Caller) -> None:
    sample = Sample(metadata={"mcp_calls": {"loud": 19}})
    answered, refused = program(ADD, ADD, sample=sample)
    assert answered.startswith("3 after") and refused == "error: 20 calls of loud were made, no more are answered"


def test_a_slow_call_is_given_up_and_the_server_goes_on(program: Caller) -> None:
    assert program(("sleep", {"seconds": 60}), timeout_s=0.3) == ["error: sleep took more than 0.3 s"]
    assert take_tool_timeouts() == 1
    (answer,) = program(ADD)
    assert answer != "3 after 1 calls", "it is the same server"


def test_a_server_that_dies_floods_or_hangs_costs_its_call_and_is_started_again(
    program: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    died, again = program(("die", {}), ADD)
    assert died == "error: loud ended with exit status 3 while it made this call" and again == "3 after 1 calls"
    flooded, again = program(("big", {"megabytes": 10}), ADD)
    assert flooded == "error: loud sent a message of more than 4 MiB while it made this call"
    assert again == "3 after 1 calls"
    monkeypatch.setattr(mcp_tools, "PING_S", 0.2)
    assert program(("hang", {"seconds": 60}), timeout_s=0.3) == ["error: hang took more than 0.3 s"]
    assert take_tool_timeouts() == 1
    time.sleep(0.5)
    assert program(ADD) == ["3 after 1 calls"]


def test_a_server_over_http_answers_and_a_flood_disconnects(port: int) -> None:
    caller = Caller({"name": "far", "url": f"http://127.0.0.1:{port}/mcp", "tools": ["add", "big", "refuse"]})
    sum_, refused, unlisted, flooded, again = caller(ADD, ("refuse", {}), ("die", {}), ("big", {"megabytes": 10}), ADD)
    assert sum_.startswith("3 after") and again.startswith("3 after")
    assert refused == "error: Error executing tool refuse: not today"
    assert unlisted == "error: no tool die; there is add, big, refuse", "only tools of the list may be called"
    assert flooded == "error: far sent a message of more than 4 MiB while it made this call"
    caller.close()


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"tools": ["add", "subtract"]}, "mcp: .* has no tool subtract; it has add, refuse, die"),
        ({"command": [sys.executable, "-Sc", "print('hello'); raise SystemExit(4)"]}, "ended with exit status 4"),
        ({"command": [sys.executable, "-Sc", "import time; time.sleep(60)"], "timeout_s": 0.5}, "within 0.5 s"),
        ({"url": "http://127.0.0.1:9/mcp"}, "cannot be used: ConnectError"),
    ],
)
def test_a_server_that_never_worked_is_an_error_of_the_run(port: int, server: dict[str, Any], message: str) -> None:
    before = registry().running()
    caller = Caller({**({} if "command" in server else {"url": f"http://127.0.0.1:{port}/mcp"}), **server})
    with pytest.raises(UsageError, match=message):
        caller(ADD)
    wait("the process to be gone", 30, lambda: registry().running() == before)  # it has a moment to end by itself


def test_two_servers_with_one_tool_are_refused(port: int) -> None:
    url = f"http://127.0.0.1:{port}/mcp"
    caller = Caller({"name": "one", "url": url}, {"name": "two", "url": url})
    with pytest.raises(UsageError, match="one and two both have a tool add; leave it out of one"):
        caller(ADD)


@pytest.mark.parametrize("function", [generate, generate_turns])
def test_a_conversation_calls_a_server_whose_tools_the_template_shows(run: Any, port: int, function: Any) -> None:  # noqa: F811
    servers = [{"name": "far", "url": f"http://127.0.0.1:{port}/mcp", "tools": ["add"]}]
    McpTools.clear_instances()
    sample = Sample(index=5, group_index=2, prompt=[{"role": "user", "content": "1+2?"}])
    made, model = run([call(a=1, b=2), "3"], function=function, sample=sample, mcp=servers, tool_function_path=None)
    made = made[-1] if isinstance(made, list) else made
    assert "Add two numbers." in model.seen(0) and "<tool_response>\n3 after" in model.seen(1)
    assert final_answer(made) == "3" and made.metadata["mcp_calls"] == {"far": 1}
    Caller({"url": "http://x"}).close()


def test_a_server_that_is_gone_is_an_environment_that_failed(run: Any, port: int) -> None:  # noqa: F811
    caller = Caller({"url": f"http://127.0.0.1:{port}/mcp"})
    caller(ADD)
    caller.lose()
    sample = Sample(index=5, group_index=2, prompt=[{"role": "user", "content": "1+2?"}])
    made, _ = run([call(a=1, b=2), "3"], sample=sample, mcp=caller.args.mcp, tool_function_path=None)
    assert (made.end_reason, made.reward_is_trusted) == ("env_error", False)
    with pytest.raises(EnvError, match="could not be connected to a moment ago"):
        caller(ADD)
    McpTools.clear_instances()


def test_a_server_that_hangs_at_its_start_is_an_environment_that_failed(port: int) -> None:
    caller = Caller({"url": f"http://127.0.0.1:{port}/mcp"})
    caller(ADD)
    async_utils.run(caller.tools.close())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        [client] = caller.tools.clients
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/mcp"
        client.server = client.server.model_copy(update={"url": url, "timeout_s": 2.5})
        with pytest.raises(EnvError, match="did not answer within 2.25 s"):
            caller(ADD)
    caller.close()


def test_what_may_be_secret_in_an_address_is_in_no_message() -> None:
    server = McpServer(url="https://me:secret@host:8/mcp?token=secret#secret")
    assert server.label == "https://host:8/mcp"
