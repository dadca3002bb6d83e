"""MCP tools for agents: a real server's tools through the gateway's endpoint, under the session's key, bounded."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from slime.agent import rollout
from slime.agent.adapters.session import Session
from slime.agent.gateway import Gateway
from slime.agent.harness import HARNESSES, HarnessContext, make_harness
from slime.agent.mcp_endpoint import McpEndpoint
from slime.rollout.hooks.sample_errors import sample_problem
from slime.rollout.mcp_tools import McpTools
from slime.utils import async_utils
from slime.utils.processing_utils import open_image
from slime.utils.types import Sample
from tests.rollout.test_mcp_tools import COMMAND
from tests.unit.agent_fakes import CHAT, finish, gateway, opened, raw, send, until
from tests.unit.rollout_fakes import rollout_args
from tests.unit.test_agent_generate import END, TASK, TOKENIZER, arguments, call
from tests.unit.test_agent_pictures import seeing

SERVER = {"name": "loud", "command": COMMAND, "timeout_s": 30, "max_result_chars": 40, "max_calls": 3}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[McpEndpoint]:
    McpTools.clear_instances()
    args = rollout_args()
    args.mcp = [SERVER]
    found = async_utils.run(McpEndpoint.of(args))
    assert found is not None
    yield found
    async_utils.run(found.tools.close())
    McpTools.clear_instances()


def rpc(server: Gateway, key: str, method: str, **params: Any) -> Any:
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    status, text = raw(server.url, "/mcp", message, Authorization=f"Bearer {key}")
    assert status == 200, text
    return json.loads(text)


def said(answer: Any) -> tuple[str, bool]:
    return answer["result"]["content"][0]["text"], answer["result"]["isError"]


def test_the_real_client_lists_and_calls_the_tools_of_the_runs_server(endpoint: McpEndpoint) -> None:
    import mcp
    from mcp.client.streamable_http import streamablehttp_client

    async def use(url: str, key: str) -> tuple[set[str], Any]:
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            streamablehttp_client(f"{url}/mcp", headers=headers) as (read, write, _),
            mcp.ClientSession(read, write) as session,
        ):
            await session.initialize()
            await session.send_ping()
            tools = await session.list_tools()
            return {tool.name for tool in tools.tools}, await session.call_tool("add", {"a": 1, "b": 2})

    with gateway([]) as (server, _):
        server.mcp = endpoint
        names, result = asyncio.run(use(server.url, opened(server)))
    assert {"add", "refuse", "sleep"} <= names
    assert result.content[0].text.startswith("3 after") and not result.isError


def test_calls_are_bounded_and_counted_for_each_session(endpoint: McpEndpoint) -> None:
    with gateway(["a"]) as (server, _):
        server.mcp = endpoint
        key, other = opened(server), opened(server)
        text, is_error = said(rpc(server, key, "tools/call", name="big", arguments={"megabytes": 1}))
        assert not is_error and text.startswith("x" * 40 + "\n[cut")
        assert said(rpc(server, key, "tools/call", name="refuse")) == (
            "error: Error executing tool refuse: not today",
            True,
        )
        rpc(server, key, "tools/call", name="add", arguments={"a": 1, "b": 2})
        text, is_error = said(rpc(server, key, "tools/call", name="add", arguments={"a": 1, "b": 2}))
        assert is_error and "3 calls of loud were made" in text
        assert said(rpc(server, other, "tools/call", name="add", arguments={"a": 1, "b": 2}))[1] is False
        assert send(server, CHAT, key)[0] == 200
        [sample] = finish(server, key)
    assert sample.metadata["mcp_calls"] == {"loud": 3} and sample.reward_is_trusted


def test_an_image_of_a_tool_comes_back_in_a_request_and_is_trained_on(
    endpoint: McpEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with seeing(["one", "red"]) as (server, engine):
        server.mcp, key = endpoint, opened(server)
        [left_out] = rpc(server, key, "tools/call", name="camera", arguments={"letter": "a"})["result"]["content"]
        assert left_out["text"] == "a\n[image image/png]", "without --multimodal-keys"
        monkeypatch.setattr(endpoint.args, "multimodal_keys", {"image": "none"})
        words, image = rpc(server, key, "tools/call", name="camera", arguments={"letter": "a"})["result"]["content"]
        assert (words["text"], image["type"], image["mimeType"]) == ("a", "image", "image/png")
        seen = {"type": "image_url", "image_url": {"url": f"data:{image['mimeType']};base64,{image['data']}"}}
        asked: list[Any] = [{"role": "user", "content": "look"}]
        engine.meta = {"prompt_tokens": len("<user>look<assistant>")}
        assert send(server, CHAT, key, {"messages": asked})[0] == 200
        asked += [{"role": "assistant", "content": "one"}, {"role": "tool", "content": [words, seen]}]
        engine.meta = {"prompt_tokens": len("<user>look<assistant>one<tool>a<assistant>") + 48}
        assert send(server, CHAT, key, {"messages": asked})[0] == 200
        [sample] = finish(server, key)
    shown = open_image(engine.requests[-1]["image_data"][0])
    assert shown.size == (48, 32) and shown.getpixel((0, 0)) == (255, 0, 0)
    # the processor of this test makes a token of each column
    assert sample.image_spans == [[len("<user>look<assistant>one<tool>a"), 48]]
    assert sample.metadata["mcp_calls"] == {"loud": 2} and sample_problem(rollout_args(), sample) is None


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"{", 400, "no JSON"),
        ([{"method": "ping", "id": 1}], 200, "-32600"),
        ({"method": "ping"}, 202, ""),
        ({"method": "prompts/list", "id": 1}, 200, "-32601"),
        ({"method": "tools/call", "id": 1, "params": {"name": ["add"]}}, 200, "there is add, "),
        ({"method": "tools/call", "id": 1, "params": {"name": "add", "arguments": 3}}, 200, "must be an object"),
        ({"method": "initialize", "id": 1, "params": {"protocolVersion": "1"}}, 200, '"protocolVersion":"2025-06-18"'),
        # it asks for batches, and there are none
        ({"method": "initialize", "id": 1, "params": {"protocolVersion": "2025-03-26"}}, 200, '"2025-06-18"'),
    ],
)
def test_messages_of_a_wrong_shape_are_answered(endpoint: McpEndpoint, body: Any, status: int, text: str) -> None:
    with gateway([]) as (server, _):
        server.mcp = endpoint
        found = raw(server.url, "/mcp", body, Authorization=f"Bearer {opened(server)}")
        assert found[0] == status and text in found[1]


def test_foreign_keys_and_runs_without_servers_are_refused(endpoint: McpEndpoint) -> None:
    ping = {"method": "ping", "id": 1}
    with gateway([]) as (server, _):
        status, text = raw(server.url, f"/s/{opened(server)}/mcp", ping)
        assert status == 404 and "mcp of --custom-config-path" in text
        server.mcp = endpoint
        assert raw(server.url, "/mcp", ping, Authorization="Bearer foreign")[0] == 401
        key = opened(server)
        asyncio.run(server.drop_session(key))
        assert raw(server.url, f"/s/{key}/mcp", ping)[0] == 410


def test_a_server_that_is_gone_makes_the_session_untrusted_whatever_is_said_after_it(endpoint: McpEndpoint) -> None:
    with gateway(["a"]) as (server, _):
        key = opened(server)
        server.mcp = endpoint
        client = endpoint.tools.clients[0]
        working = client.server
        client.server = working.model_copy(update={"command": ["/nowhere"]})
        async_utils.run(endpoint.tools.close())
        try:
            assert said(rpc(server, key, "tools/call", name="add", arguments={"a": 1, "b": 2}))[1] is True
        finally:
            client.server, client._failed_at = working, -99.0
        assert send(server, CHAT, key)[0] == 200 and server.end_reason(key) == "env_error"
        [sample] = finish(server, key)
        assert (sample.end_reason, sample.reward_is_trusted) == ("env_error", False)


class SlowServer:
    """A server of tools that is gone only after a while, or never answers."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.is_asked, self.is_cancelled = seconds, False, False

    async def answer(self, message: Any, session: Session) -> dict[str, Any]:
        self.is_asked = True
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        session.tool_failure = "gone"
        return {}


def hung_up_on(server: Gateway, slow: SlowServer) -> str:
    """The key of a session whose client gives a call up."""
    server.mcp, key = slow, opened(server)  # type: ignore[assignment]
    with socket.create_connection((server.host, server.port)) as client:
        head = f"POST /s/{key}/mcp HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}"
        client.sendall(head.encode())
        until(lambda: slow.is_asked)
    return key


def test_the_end_of_a_session_waits_for_a_call_that_its_agent_gave_up() -> None:
    with gateway(["a"]) as (server, _):
        key = hung_up_on(server, SlowServer(0.5))
        assert send(server, CHAT, key)[0] == 200
        [sample] = finish(server, key)
    assert (sample.end_reason, sample.reward_is_trusted) == ("env_error", False)


def test_a_session_that_is_dropped_cancels_its_calls_and_says_so() -> None:
    slow = SlowServer(60)
    with gateway([]) as (server, _), ThreadPoolExecutor(1) as clients:
        server.mcp, key = slow, opened(server)  # type: ignore[assignment]
        found = clients.submit(raw, server.url, f"/s/{key}/mcp", {"method": "ping", "id": 1})
        until(lambda: slow.is_asked)
        asyncio.run(server.drop_session(key))
        assert slow.is_cancelled and found.result(10)[0] == 410


def test_a_session_that_ends_while_a_message_is_read_gets_no_call() -> None:
    slow = SlowServer(0.0)
    with gateway([]) as (server, _):
        server.mcp, key = slow, opened(server)  # type: ignore[assignment]
        with socket.create_connection((server.host, server.port), timeout=10) as client:
            client.sendall(f"POST /s/{key}/mcp HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{".encode())
            time.sleep(0.2)  # until the head is read
            asyncio.run(server.drop_session(key))
            client.sendall(b"}")
            assert b" 410 " in client.recv(100) and not slow.is_asked


def test_an_agent_in_a_sandbox_calls_a_tool_that_only_the_gateway_reaches(
    endpoint: McpEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = "<tool_call><function=environment><parameter=name>PATH</parameter></function></tool_call>"
    agent = {"harness": "scripted", "sandbox": {"options": {"show": sorted({sys.prefix, sys.base_prefix})}}}
    monkeypatch.setattr(rollout, "GenerateState", lambda args: type("State", (), {"aborted": False}))
    rollout.Places.clear_instances()
    with gateway([add + END, call("true") + END, "done" + END], tokenizer=TOKENIZER) as (server, engine):

        async def shared(args: Any) -> Gateway:
            server.mcp = endpoint
            return server

        monkeypatch.setattr(rollout, "shared_gateway", shared)
        sample = Sample(index=0, prompt="look", metadata=dict(TASK))
        given = rollout.generate(arguments(agent), sample, {"max_new_tokens": 99})
        sample = async_utils.run(given)
        read = TOKENIZER.decode(engine.requests[1]["input_ids"])
    rollout.Places.clear_instances()
    assert sample.metadata["mcp_calls"] == {"loud": 1} and sample.end_reason == "done"
    assert "/bin" in read.rpartition(add)[2], "the tool's answer is what the model reads next"


class Box:
    """Keeps what a harness writes and runs."""

    sandbox_id = "box"

    def __init__(self) -> None:
        self.said = ""

    async def write_file(self, path: str, data: Any, **_: Any) -> None:
        self.said += f"{path} {data}\n"

    async def exec(self, cmd: str, **_: Any) -> tuple[int, str, str]:
        self.said += cmd
        return 0, "0", ""

    async def read_file(self, path: str, **_: Any) -> str:
        return "0"


@pytest.mark.parametrize("name", sorted(HARNESSES))
def test_every_harness_that_uses_tools_is_told_where_they_are(name: str) -> None:
    harness, said = make_harness(name), []
    for offers_tools in (True, False):
        box = Box()
        context = HarnessContext("/w", "a-key", "http://127.0.0.1:8000", offers_tools=offers_tools)
        asyncio.run(harness.write_config(box, context))  # type: ignore[arg-type]
        asyncio.run(harness.launch_and_wait(box, context, "fix it", 5))  # type: ignore[arg-type]
        if written := re.search(r"echo (\S+) \| base64 -d", box.said):
            box.said += base64.b64decode(written[1]).decode()
        said.append("127.0.0.1:8000/mcp" in box.said)
    assert said == [harness.takes_tools, False]
