"""Tools of MCP servers for slime.rollout.multi_turn: connections of this process, calls bounded in time, size, number.

One connection a server serves all samples of the process, so what a server remembers, samples share. A server that
ends, hangs or answers nonsense costs the call that it was making: the model reads what happened, and the next call
connects anew. Where that fails, the environment failed (`EnvError`). One that never worked is an error of the run.

Wait graph: a call waits for the connection (nine tenths of `timeout_s` for a start; one at a time) and for the answer
of the server. The caller's deadline (slime.rollout.tool_calls) ends that; then the server has `PING_S` to show that it
lives. Each connection is owned by one task, which ends when the server does, or when it is told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from slime.config.args import Args
from slime.config.mcp_servers import McpServer, mcp_servers, resolved
from slime.processes.registry import log_tail, registry, start_with_streams
from slime.processes.wait import DaemonThreads
from slime.rollout.tool_calls import EnvError, ToolError
from slime.utils.async_utils import cancel_all
from slime.utils.errors import UsageError
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
MAX_MESSAGE_BYTES = 4 << 20
"""A server that sends a longer message is disconnected."""
_TOO_LONG = f"sent a message of more than {MAX_MESSAGE_BYTES >> 20} MiB"
PING_S = 5.0
_EXIT_S = 0.1
_PAUSE_S = 5.0  # between two attempts to connect to a server that is gone
_START_SHARE = 0.9  # in a call: that its server does not start is known before the caller gives the call up
_MOST_TOOLS = 1000
_threads = DaemonThreads("mcp", 4)


class McpTools(metaclass=SingletonMeta):
    """The servers of this process, and which of them has which tool.

    Args:
        args: `mcp` of the custom config, `output_dir` for the logs of programs.
    """

    def __init__(self, args: Args) -> None:
        logs = Path(args.output_dir).absolute() / "logs" if args.output_dir else None
        self.clients = [_Client(server, number, logs) for number, server in enumerate(mcp_servers(args))]
        self._by_tool: dict[str, _Client] = {}
        self._lock = asyncio.Lock()
        self.schemas: list[dict[str, Any]] = []
        """For the chat template, of all servers."""

    @classmethod
    async def of(cls, args: Args) -> McpTools | None:
        """Return the tools, connected for the first time where they were not; None where the run has no servers.

        Raises:
            UsageError: a server cannot be used, lacks a tool of its list, or has one of the name of another's.
        """
        if vars(args).get("mcp") is None:
            return None
        tools = cls(args)
        async with tools._lock:
            if not tools._by_tool:
                await tools._connect()
        return tools

    async def _connect(self) -> None:
        try:
            self._by_tool, self.schemas = await self._found()
        except UsageError:
            await self.close()
            raise

    async def _found(self) -> tuple[dict[str, _Client], list[dict[str, Any]]]:
        by_tool: dict[str, _Client] = {}
        schemas = []
        for client in self.clients:
            for schema in await client.first_tools():
                name = schema["function"]["name"]
                if name in by_tool:
                    raise UsageError(
                        f"mcp: {by_tool[name].label} and {client.label} both have a tool {name}; leave it out of one "
                        "of them with `tools`"
                    )
                by_tool[name] = client
                schemas.append(schema)
        return by_tool, schemas

    def has(self, name: str) -> bool:
        """Whether a tool is a server's."""
        return name in self._by_tool

    def timeout_s(self, name: str) -> float:
        """Longest time of a call."""
        return self._by_tool[name].server.timeout_s

    async def call(self, args: Args, sample: Sample, name: str, arguments: dict[str, Any]) -> Any:
        """Make one call, as a tool function does (ToolFn): a text, or parts with images for a model that sees them.

        Raises:
            ToolError: the tool, its server or the bound on calls says no; the model reads it.
            EnvError: the server is gone.
        """
        client = self._by_tool[name]
        counts: dict[str, int] = dict(sample.metadata.get("mcp_calls") or {})
        if counts.get(client.label, 0) >= client.server.max_calls:
            raise ToolError(f"{client.server.max_calls} calls of {client.label} were made, no more are answered")
        sample.metadata["mcp_calls"] = counts | {client.label: counts.get(client.label, 0) + 1}
        return await client.call(name, arguments, with_images=bool(args.multimodal_keys))

    async def close(self) -> None:
        """End every connection, and the programs that were started."""
        for client in self.clients:
            await client.close()


class _Client:
    """One server: its connection, made anew where it has ended."""

    def __init__(self, server: McpServer, number: int, logs: Path | None) -> None:
        self.server, self.label = server, server.label
        self._log_path = None if logs is None else logs / f"mcp_{number}.log"
        self._lock = asyncio.Lock()
        self._connection: _Connection | None = None
        self._failed_at = -_PAUSE_S
        self._pings: set[asyncio.Task[None]] = set()

    async def first_tools(self) -> list[dict[str, Any]]:
        """Return the schemas of the tools that the model may call.

        Raises:
            UsageError: the server cannot be used, or lacks one that is asked for.
        """
        try:
            tools = {tool.name: tool for tool in (await self._connected(1.0)).tools}
        except EnvError as error:
            raise UsageError(f"mcp: {error}") from error
        wanted = self.server.tools if self.server.tools is not None else list(tools)
        if lacking := [name for name in wanted if name not in tools]:
            raise UsageError(
                f"mcp: {self.label} has no tool {', '.join(lacking)}; it has {', '.join(tools) or 'none'}"
            )
        return [_schema(tools[name]) for name in wanted]

    async def call(self, name: str, arguments: dict[str, Any], *, with_images: bool) -> Any:
        connection = await self._connected(_START_SHARE)
        work = asyncio.ensure_future(connection.session.call_tool(name, arguments))
        try:
            late = 2 * self.server.timeout_s  # the caller has given up long before
            await asyncio.wait([work, connection.task], timeout=late, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ToolError(f"{self.label} {connection.end} while it made this call")
            return await self._answer_of(work, connection, with_images)
        except asyncio.CancelledError:  # the caller's deadline: is it the call that hangs, or the server?
            ping = asyncio.ensure_future(connection.end_unless_alive())
            self._pings.add(ping)
            ping.add_done_callback(self._pings.discard)
            raise
        finally:
            if not work.done():
                await cancel_all([work])

    async def _answer_of(self, work: asyncio.Future[Any], connection: _Connection, with_images: bool) -> Any:
        from mcp import McpError
        from mcp.types import CONNECTION_CLOSED
        from pydantic import ValidationError

        try:
            result = await work
        except McpError as error:
            if error.error.code == CONNECTION_CLOSED or "Session terminated" in str(error):
                connection.stop(f"ended ({error})")
                raise ToolError(f"{self.label} {connection.end} while it made this call") from error
            raise ToolError(f"{self.label}: {error}"[: self.server.max_result_chars]) from error
        except (ValidationError, RuntimeError) as error:  # the client's own words for what is no answer of MCP
            raise ToolError(f"{self.label} gave an answer that is none of MCP: {str(error)[:200]}") from error
        images = [b for b in result.content if b.type == "image"] if with_images and not result.isError else []
        text = _cut(_shown(result, left_out=images), self.server.max_result_chars)
        if result.isError:
            raise ToolError(text)
        seen = [{"type": "image", "image": f"data:{image.mimeType};base64,{image.data}"} for image in images]
        return [{"type": "text", "text": text}, *seen] if seen else text

    async def _connected(self, share: float) -> _Connection:
        """Return the connection, a new one where the last has ended; its start has a share of `timeout_s`.

        Raises:
            EnvError: none can be made.
        """
        async with self._lock:
            if self._connection is not None and not self._connection.task.done() and not self._connection.is_stopping:
                return self._connection
            if time.monotonic() - self._failed_at < _PAUSE_S:
                raise EnvError(f"{self.label} could not be connected to a moment ago")
            if self._connection is not None:
                logger.warning("MCP server %s %s; connecting anew", self.label, self._connection.end)
            self._connection = None
            connection = _Connection(self.server, self._log_path)
            try:
                await connection.begun(share * self.server.timeout_s)
            except EnvError:
                self._failed_at = time.monotonic()
                raise
            self._connection = connection
            return connection

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.stop("was closed")
            await asyncio.wait([self._connection.task], timeout=2 * PING_S)
            self._connection = None


class _Connection:
    """A session with a server, in a task of its own: the client library wants to be left where it was entered.

    Attributes:
        session, tools: once it has begun.
        end: what happened to the server, as the end of a sentence.
    """

    session: Any
    tools: list[Any]

    def __init__(self, server: McpServer, log_path: Path | None) -> None:
        self._server, self._log_path = server, log_path
        self.end = "ended"
        self._stop = asyncio.Event()
        self._has_begun = asyncio.get_running_loop().create_future()
        self._error: BaseException | None = None
        self.task = asyncio.ensure_future(self._serve())
        self.task.add_done_callback(self._note_error)

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to end."""
        return self._stop.is_set()

    def stop(self, end: str) -> None:
        """End it, for a reason."""
        if not self._stop.is_set():
            self.end = end
            self._stop.set()

    async def begun(self, timeout_s: float) -> None:
        """Wait until it can be used, for so many seconds.

        Raises:
            EnvError: the server did not start or answer in time, or said what no MCP server says.
        """
        done: set[Any] = set()
        try:
            done, _ = await asyncio.wait(
                [self._has_begun, self.task], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            if not self._has_begun.done():
                await cancel_all([self.task])
        if self._has_begun.done():
            return
        what = f"it {self.end}" if self._error is None else _innermost(self._error)
        why = f"cannot be used: {what}" if done else f"did not answer within {timeout_s:g} s"
        raise EnvError(f"{self._server.label} {why}{self._log()}")

    async def end_unless_alive(self) -> None:
        """End it where the server does not even answer a ping."""
        ping = asyncio.ensure_future(self.session.send_ping())
        await asyncio.wait([ping, self.task], timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
        if not ping.done():
            self.stop("hung")
            ping.cancel()
        elif error := None if ping.cancelled() else ping.exception():
            self.stop(f"ended ({error})")

    async def _serve(self) -> None:
        import mcp

        late = timedelta(seconds=2 * self._server.timeout_s)  # each call has its own, shorter deadline
        async with (
            self._streams() as (read, write),
            mcp.ClientSession(read, write, read_timeout_seconds=late) as session,
        ):
            await session.initialize()
            self.session, self.tools = session, await _all_tools(session)
            self._has_begun.set_result(None)
            await self._stop.wait()

    def _note_error(self, task: asyncio.Future[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.is_stopping:  # else it is what came of the end that is known
            self._error = error
            self.stop(f"ended ({_innermost(error)})")

    def _streams(self) -> contextlib.AbstractAsyncContextManager[Any]:
        server = self._server
        return _http(server, on_end=self.stop) if server.url else _stdio(server, self._log_path, on_end=self.stop)

    def _log(self) -> str:
        if self._log_path is None or self._server.url or not self._log_path.exists():
            return ""
        return f"\n{self._log_path}:\n{log_tail(self._log_path, 10)}"


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:300]


async def _all_tools(session: Any) -> list[Any]:
    page = await session.list_tools()
    found = list(page.tools)
    while page.nextCursor is not None and len(found) < _MOST_TOOLS:
        page = await session.list_tools(page.nextCursor)
        found += page.tools
    return found


def _schema(tool: Any) -> dict[str, Any]:
    about = {"name": tool.name, "description": tool.description or "", "parameters": tool.inputSchema}
    return {"type": "function", "function": about}


def _shown(result: Any, *, left_out: Sequence[Any]) -> str:
    """What the model reads of an answer: its texts; of images that it does not see, sounds and files their kind."""
    parts = [b.text if b.type == "text" else _shown_block(b) for b in result.content if b not in left_out]
    if not result.content and result.structuredContent is not None:
        return json.dumps(result.structuredContent, ensure_ascii=False)
    return "\n".join(parts)


def _shown_block(block: Any) -> str:
    text = getattr(getattr(block, "resource", None), "text", None)
    kind = getattr(block, "mimeType", None) or getattr(block, "uri", "")
    return f"[{block.type} {kind}]" if text is None else str(text)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}\n[cut: the first {most} of {len(text)} characters]"


# ---- the way to a server; both are bounded, which the client library's own are not


@contextlib.asynccontextmanager
async def _http(server: McpServer, *, on_end: Any) -> AsyncIterator[tuple[Any, Any]]:
    import httpx
    from mcp.client.streamable_http import streamable_http_client

    class Body(httpx.AsyncByteStream):
        def __init__(self, stream: Any, is_answer: bool) -> None:
            self.stream, self.is_answer = stream, is_answer

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            try:
                async for chunk in self.stream:
                    size += len(chunk)
                    if size > MAX_MESSAGE_BYTES:
                        raise httpx.ReadError(_TOO_LONG)
                    yield chunk
            except httpx.HTTPError as error:  # the client library would wait on
                if self.is_answer:
                    on_end(_TOO_LONG if size > MAX_MESSAGE_BYTES else f"ended ({type(error).__name__})")
                raise

        async def aclose(self) -> None:
            await self.stream.aclose()

    class Bounded(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            answer = await super().handle_async_request(request)
            answer.stream = Body(answer.stream, request.method == "POST")
            return answer

    timeout = httpx.Timeout(server.timeout_s, read=None)  # a call has its own deadline, and events may be rare
    client = httpx.AsyncClient(headers=resolved(server.headers), timeout=timeout, transport=Bounded())
    async with client, streamable_http_client(server.url or "", http_client=client) as (read, write, _):
        yield read, write


@contextlib.asynccontextmanager
async def _stdio(server: McpServer, log_path: Path | None, *, on_end: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A program of this run: it ends with the connection, and with this process however that ends."""
    import anyio
    from mcp.client.stdio import get_default_environment

    process, reader, writer = await start_with_streams(
        list(server.command or ()),
        name=f"MCP server {server.label}",
        log_path=log_path,
        env={**get_default_environment(), **resolved(server.env)},
        cwd=server.cwd,
        limit=MAX_MESSAGE_BYTES,
    )
    to_us, read = anyio.create_memory_object_stream[Any](0)
    write, from_us = anyio.create_memory_object_stream[Any](0)
    tasks = [
        asyncio.ensure_future(_read(reader, to_us, on_end, lambda: process.poll())),
        asyncio.ensure_future(_write(writer, from_us)),
    ]
    try:
        yield read, write
    finally:
        await cancel_all(tasks)
        writer.close()
        for stream in (to_us, read, write, from_us):
            stream.close()
        await _threads.run(registry().end, process)


async def _read(reader: asyncio.StreamReader, to_us: Any, on_end: Any, status: Any) -> None:
    from mcp.shared.message import SessionMessage
    from mcp.types import JSONRPCMessage
    from pydantic import ValidationError

    with to_us:  # closed, it ends the session's calls
        end, is_warned = "", False
        while not end:
            try:
                line = await reader.readuntil(b"\n")
                await to_us.send(SessionMessage(JSONRPCMessage.model_validate_json(line)))
            except asyncio.IncompleteReadError:
                await asyncio.sleep(_EXIT_S)  # its exit status comes after its last word
                end = "ended" if (code := status()) is None else f"ended with exit status {code}"
            except asyncio.LimitOverrunError:
                end = _TOO_LONG
            except OSError as error:
                end = f"ended ({error})"
            except ValidationError:  # something else that it prints
                if not is_warned:
                    logger.warning("an MCP server wrote a line that is no message of MCP: %r", line[:200])
                is_warned = True
        on_end(end)


async def _write(writer: asyncio.StreamWriter, from_us: Any) -> None:
    with contextlib.suppress(OSError):  # its end is seen where it is read from
        async for message in from_us:
            writer.write(message.message.model_dump_json(by_alias=True, exclude_none=True).encode() + b"\n")
            await writer.drain()
