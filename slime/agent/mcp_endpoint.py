"""The tools of a run's MCP servers (`mcp` in the file of --custom-config-path) for its agents: one MCP server of ours.

An agent in a sandbox reaches the gateway and nothing else, so the gateway has an endpoint of the Model Context
Protocol (POST /mcp, streamable HTTP, whole answers) under each session's key. `slime.rollout.mcp_tools` makes the
calls, bounded in time, size and number; this module knows the protocol alone.

Wait graph: a request waits for its call, which runs in the event loop of the rollout, `timeout_s` of its server.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from slime.agent.adapters.session import Session
from slime.config.args import Args
from slime.rollout.mcp_tools import McpTools
from slime.rollout.tool_calls import EnvError, ToolCall, call_tool

logger = logging.getLogger(__name__)
PATH = "/mcp"
_VERSIONS = ("2025-06-18", "2024-11-05")
"""Versions of the protocol that it speaks. 2025-03-26 is left out: it asks for batches of messages."""
_INVALID, _UNKNOWN_METHOD, _WRONG_PARAMS = -32600, -32601, -32602


class McpEndpoint:
    """Answers the messages of agents' MCP clients.

    Args:
        args: the run's.
        tools: of its servers, connected.
        loop: in which they were connected.
    """

    def __init__(self, args: Args, tools: McpTools, loop: asyncio.AbstractEventLoop) -> None:
        self.args, self.tools, self.loop = args, tools, loop
        self._functions = {schema["function"]["name"]: schema["function"] for schema in tools.schemas}

    @classmethod
    async def of(cls, args: Args) -> McpEndpoint | None:
        """The endpoint of a run; None where it has no servers.

        Raises:
            UsageError: a server cannot be used.
        """
        tools = await McpTools.of(args)
        return None if tools is None else cls(args, tools, asyncio.get_running_loop())

    async def answer(self, message: Any, session: Session) -> dict[str, Any] | None:
        """The answer to one message; None where it asks for none.

        Args:
            message: JSON of a client.
            session: its calls are counted, and why a server is gone: what the agent does without it says nothing.
        """
        if not isinstance(message, dict) or not isinstance(message.get("method"), str):
            return _error(None, _INVALID, "a message is one JSON object with a method")
        if (number := message.get("id")) is None:
            return None
        method, params = message["method"], message.get("params") or {}
        if method == "initialize":
            asked = params.get("protocolVersion") if isinstance(params, dict) else None
            about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "slime", "version": "1"}}
            return _result(number, {"protocolVersion": asked if asked in _VERSIONS else _VERSIONS[0], **about})
        if method == "ping":
            return _result(number, {})
        if method == "tools/list":
            return _result(number, {"tools": [_shown(function) for function in self._functions.values()]})
        if method != "tools/call":
            return _error(number, _UNKNOWN_METHOD, f"there is no method {method[:100]}, only tools")
        params = params if isinstance(params, dict) else {}
        name, arguments = str(params.get("name")), params.get("arguments")
        if name not in self._functions:
            return _error(number, _WRONG_PARAMS, f"no tool {name[:100]}; there is {', '.join(self._functions)}")
        if not isinstance(arguments or {}, dict):
            return _error(number, _WRONG_PARAMS, "arguments must be an object")
        called = asyncio.run_coroutine_threadsafe(self._call(ToolCall(name, arguments or {}), session), self.loop)
        answer, succeeded = await asyncio.wrap_future(called)
        parts = [{"type": "text", "text": answer}] if isinstance(answer, str) else answer
        return _result(number, {"content": [_block(part) for part in parts], "isError": not succeeded})

    async def _call(self, call: ToolCall, session: Session) -> tuple[Any, bool]:
        known, limit_s = list(self._functions), self.tools.timeout_s(call.name)
        try:
            return await call_tool(
                self.tools.call, self.args, session.tool_calls, call, known=known, timeout_s=limit_s
            )
        except (EnvError, RuntimeError) as error:  # the second: what a tool raises that is none of its own words
            logger.warning("a tool of an agent failed: %s", error)
            session.tool_failure = str(error)
            return f"error: {call.name} cannot be called any more", False


def _block(part: dict[str, Any]) -> dict[str, Any]:
    """A content part as MCP has it: an image is base64 beside its type."""
    if part["type"] == "text":
        return part
    head, _, data = part["image"].partition(";base64,")
    return {"type": "image", "data": data, "mimeType": head.removeprefix("data:")}


def _shown(function: dict[str, Any]) -> dict[str, Any]:
    about = {key: function[key] for key in ("name", "description")}
    return {**about, "inputSchema": function["parameters"]}


def _result(number: Any, result: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def _error(number: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}
