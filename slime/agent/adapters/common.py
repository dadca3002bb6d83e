"""An HTTP server that agents take for OpenAI or Anthropic, and that keeps every token for training.

One request is one turn: the body is translated to chat messages, the engine continues the session's tokens, the answer
is parsed and written to the client, and only then is the turn recorded: what a client never got is not trained.
`finish_session` turns a session into samples. Protocols are subclasses of `BaseAdapter`.

Wait graph: a request waits for the answer before it in its session to be recorded, for a rendering thread, and for
the engine (the shared connection pool, `engine_timeout_s` in all).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, ClassVar

from aiohttp import web

from slime.agent.adapters.session import Reply, Session, call_sglang_generate
from slime.agent.adapters.wire import (
    BadRequest,
    error_response,
    flatten_content,
    has_begun,
    keep_alive,
    manager_finish_reason,
    send_events,
    sid_from_bearer,
    sid_from_body,
    tool_call_dict,
)
from slime.agent.history import MODES, Prompt, drift, has_template
from slime.agent.parsing import ParsedModelOutput, parse_model_output, written_text
from slime.agent.trajectory import Message, TrajectoryManager, TurnRecord
from slime.processes.wait import DaemonThreads
from slime.utils.errors import UsageError
from slime.utils.types import Sample

__all__ = [
    "BadRequest",
    "BaseAdapter",
    "Reply",
    "Session",
    "TurnRecord",
    "call_sglang_generate",
    "flatten_content",
    "manager_finish_reason",
    "sid_from_bearer",
    "sid_from_body",
    "tool_call_dict",
]
MAX_BODY_BYTES = 64 * 2**20
ENGINE_TIMEOUT_S = 3600.0
PING_INTERVAL_S = 10.0
IDLE_SESSION_S = 3600.0
MAX_CLOSED = 100_000
_CANCEL_S = 10.0
_CLIENT_GONE = 499
_NO_TOOLS = ("none", {"type": "none"})
_rendering = DaemonThreads("agent-render", 4)
DebugCallback = Callable[[str, list[Message], Any, Message, TurnRecord], None]


class BaseAdapter:
    """The sessions of one protocol's server; `app` is what `run_app_in_thread` serves.

    Args:
        tokenizer: renders and decodes.
        sglang_url: of a router or an engine.
        tool_parser: SGLang's name; None knows only calls in XML.
        reasoning_parser: SGLang's name; None leaves thoughts in the text.
        max_turns_per_sid: requests that a session may make; None is no limit.
        fork_threshold_tokens: of `TrajectoryManager`.
        debug_callback: called with (sid, messages, tools, answer, turn) after each turn; its errors are logged.
        history: "append" continues a session's own tokens; "render" has the template render every request.
        engine_timeout_s: longest time of one turn in the engine, retries included.
        ping_interval_s: seconds between signs of life in a stream while the engine works.
    """

    logger: ClassVar[logging.Logger] = logging.getLogger(__name__)
    log_prefix: ClassVar[str] = "agent"
    max_token_keys: ClassVar[tuple[str, ...]] = ("max_tokens",)
    stop_keys: ClassVar[tuple[str, ...]] = ("stop",)

    def __init__(
        self,
        *,
        tokenizer: Any,
        sglang_url: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,
        debug_callback: DebugCallback | None = None,
        history: str = "append",
        engine_timeout_s: float = ENGINE_TIMEOUT_S,
        ping_interval_s: float = PING_INTERVAL_S,
    ) -> None:
        if history not in MODES:
            raise UsageError(f"history {history!r} is unknown; it is one of {', '.join(MODES)}")
        self.tokenizer = tokenizer
        self.sglang_url = sglang_url.rstrip("/")
        self.tool_parser, self.reasoning_parser = tool_parser, reasoning_parser
        self.max_turns_per_sid, self.debug_callback = max_turns_per_sid, debug_callback
        self.appends = history == "append" and has_template(tokenizer)
        self.engine_timeout_s, self.ping_interval_s = engine_timeout_s, ping_interval_s
        self.store: dict[str, Session] = {}
        self.inflight: dict[str, set[asyncio.Task[Any]]] = {}
        self.closed: set[str] = set()
        self._closed_in_order: deque[str] = deque()
        self.ignored_fields: Counter[str] = Counter()
        self.manager = TrajectoryManager(fork_threshold_tokens=fork_threshold_tokens)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.app = web.Application(client_max_size=MAX_BODY_BYTES)
        self.app.router.add_get("/healthz", self._health)
        self.app.router.add_get("/v1/models", self._health)
        self._register_routes(self.app)

    def _register_routes(self, app: web.Application) -> None:
        raise NotImplementedError

    def _session_id(self, request: web.Request, body: dict[str, Any]) -> str:
        raise NotImplementedError

    def _preprocess_body(self, body: dict[str, Any]) -> None:
        """Change a body in place before it is read."""

    def _translate(self, body: dict[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None]:
        raise NotImplementedError

    def _build_reply(self, parsed: ParsedModelOutput, raw_finish: str, messages: list[Message], tools: Any) -> Reply:
        raise NotImplementedError

    async def _respond(
        self, request: web.Request, body: dict[str, Any], reply: Reply, in_tok: int, out_tok: int, stream: bool
    ) -> web.StreamResponse:
        raise NotImplementedError

    async def _health(self, _request: web.Request) -> web.Response:
        model = {"id": "slime-actor", "object": "model", "created": 0, "owned_by": "slime"}
        return web.json_response({"ok": True, "object": "list", "data": [model]})

    def open_session(
        self,
        sid: str | None = None,
        *,
        sampling_defaults: dict[str, Any] | None = None,
        max_context_tokens: int = 0,
    ) -> str:
        """Begin a session, also one whose key was finished before.

        Args:
            sid: its key, which clients send; None makes a random one that nobody can guess.
            sampling_defaults: the run's sampling parameters.
            max_context_tokens: longest prompt and answer together; 0 is no limit.

        Returns:
            The key.

        Raises:
            ValueError: the session is open.
        """
        sid = secrets.token_urlsafe(32) if sid is None else sid
        if sid in self.store:
            raise ValueError(f"session {sid!r} is open already; finish or drop it first")
        self.closed.discard(sid)
        self.store[sid] = Session(dict(sampling_defaults or {}), max_context_tokens, is_open=True)
        return sid

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float | dict[str, Any] | None = 0.0,
        extra_metadata: dict[str, Any] | None = None,
        wait_timeout: float = 5.0,
    ) -> list[Sample]:
        """End a session and return its samples; a second call returns none. Any event loop may call it.

        Args:
            sid: its key.
            base_sample: gives index, group, prompt and label.
            reward: of every sample.
            extra_metadata: added to every sample's metadata.
            wait_timeout: seconds for turns that still run; then they are cancelled.
        """
        session = self.store.get(sid) or Session()
        await self.shutdown_session(sid, wait_timeout=wait_timeout)
        if (root := self.manager._trees.get(sid)) is not None:
            await _rendering.run(self._measure_drift, [leaf for leaf in root.leaves() if leaf.turn])
        samples = self.manager.get_trajectory(
            sid,
            base_sample=base_sample,
            reward=reward,
            extra_metadata=extra_metadata,
            max_sample_tokens=session.max_context_tokens,
        )
        for sample in samples:
            ids = sample.tokens[len(sample.tokens) - sample.response_length :]
            sample.response = str(self.tokenizer.decode(ids, skip_special_tokens=False))
            sample.metadata["agent"]["ignored_fields"] = sorted(session.ignored)
        return samples

    def _measure_drift(self, leaves: list[Any]) -> None:
        for leaf in leaves:
            messages = [node.message for node in leaf.path_from_root() if node.message]
            ids = [*leaf.turn.prompt_ids, *leaf.turn.output_ids]
            leaf.metadata["template_drift"] = drift(self.tokenizer, messages, leaf.metadata.get("tools"), ids)

    async def drop_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """End a session and throw away what was recorded."""
        await self.shutdown_session(sid, wait_timeout=wait_timeout)
        self.manager.drop_session(sid)

    async def shutdown_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """Refuse further requests of a session, and wait for those that run; what is left then is cancelled."""
        loop = self._loop
        if loop is not None and loop.is_running():
            ending = asyncio.run_coroutine_threadsafe(self._end_turns(sid, wait_timeout), loop)
            try:
                await asyncio.wait_for(asyncio.wrap_future(ending), wait_timeout + 2 * _CANCEL_S)
                return
            except TimeoutError:
                self.logger.warning("%s: the server did not end the turns of a session in time", self.log_prefix)
        self._refuse(sid)
        self._forget(sid)

    def _refuse(self, sid: str) -> None:
        if sid not in self.closed:
            self.closed.add(sid)
            self._closed_in_order.append(sid)
        while len(self._closed_in_order) > MAX_CLOSED:
            self.closed.discard(self._closed_in_order.popleft())

    def _forget(self, sid: str) -> None:
        self.inflight.pop(sid, None)
        self.store.pop(sid, None)

    async def _end_turns(self, sid: str, wait_timeout: float) -> None:
        """Wait for the turns of a session, on the loop that runs them: none begins or is recorded meanwhile."""
        self._refuse(sid)
        try:
            if tasks := self.inflight.get(sid, set()) - {asyncio.current_task()}:
                _, left = await asyncio.wait(tasks, timeout=wait_timeout)
                for task in left:
                    task.cancel()
                if left:
                    await asyncio.wait(left, timeout=_CANCEL_S)
        finally:
            self._forget(sid)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request of the protocol; errors become the client's."""
        self._loop = asyncio.get_running_loop()
        try:
            body = await self._read_body(request)
            sid = self._session_id(request, body)
            if sid in self.closed:
                return error_response(503, "session_closed", "session closed")
            session = self._session(sid)
            if self.max_turns_per_sid is not None and session.num_turns >= self.max_turns_per_sid:
                message = f"the session has had its {self.max_turns_per_sid} turns"
                return error_response(429, "rate_limit_error", message)
            session.num_turns += 1
            return await self._run_in_session(request, body, sid, session)
        except BadRequest as error:
            return await self._fail(request, str(error), 400, "invalid_request_error")
        except (RuntimeError, ValueError) as error:  # of the engine, the template, a parser's name
            self.logger.error("%s: a turn failed: %s: %s", self.log_prefix, type(error).__name__, error)
            return await self._fail(request, f"{type(error).__name__}: {error}"[:1000])

    async def _fail(
        self, request: web.Request, message: str, status: int = 500, kind: str = "api_error"
    ) -> web.StreamResponse:
        if not has_begun(request):
            return error_response(status, kind, message)
        return await send_events(request, [("error", {"type": "error", "error": {"type": kind, "message": message}})])

    async def _read_body(self, request: web.Request) -> dict[str, Any]:
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is no JSON: {error}") from None
        if not isinstance(body, dict):
            raise BadRequest(f"the body must be a JSON object, not a {type(body).__name__}")
        if body.get("n") not in (None, 1):
            raise BadRequest(f"n {body['n']}: a session has one continuation; send n requests")
        self._preprocess_body(body)
        return body

    def _session(self, sid: str) -> Session:
        """The session of a key; an unknown one is made, and those that nobody opened end when they are idle."""
        session = self.store.get(sid)
        if session is None:
            now = time.monotonic()
            for other, kept in list(self.store.items()):
                if not kept.is_open and now - kept.used_at > IDLE_SESSION_S and not self.inflight.get(other):
                    del self.store[other]
                    self.manager.drop_session(other)
            session = self.store[sid] = Session()
        session.used_at = time.monotonic()
        return session

    async def _run_in_session(
        self, request: web.Request, body: dict[str, Any], sid: str, session: Session
    ) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self.inflight.setdefault(sid, set()).add(task)
        try:
            return await self._run_turn(request, body, sid, session)
        except ConnectionError:
            return web.Response(status=_CLIENT_GONE)
        finally:
            running = self.inflight.get(sid, set())
            running.discard(task)
            if not running:
                self.inflight.pop(sid, None)

    async def _run_turn(
        self, request: web.Request, body: dict[str, Any], sid: str, session: Session
    ) -> web.StreamResponse:
        messages, tools = self._translate(body)
        stream = body.get("stream") is True or "text/event-stream" in request.headers.get("Accept", "")
        async with session.lock:  # the answer before this request is recorded
            pass
        async with keep_alive(request, self.ping_interval_s) if stream else contextlib.nullcontext():
            prompt = await self.make_prompt(session, messages, tools)
            turn = await call_sglang_generate(prompt.ids, session, body, adapter=self, session_id=sid)
            may_call = body.get("tool_choice") not in _NO_TOOLS
            parsed = await _rendering.run(self._parse, turn, tools if may_call else None)
            turn = dataclasses.replace(turn, ill_formed=turn.ill_formed or parsed.ill_formed)
        self._report_ignored(session)
        reply = self._build_reply(parsed, turn.finish_reason, messages, tools)
        async with session.lock:
            if request.transport is None or request.transport.is_closing():
                return web.Response(status=_CLIENT_GONE)
            counts = len(turn.prompt_ids), len(turn.output_ids)
            response = await self._respond(request, body, reply, *counts, stream)
            if not response.prepared:
                await response.prepare(request)
            await response.write_eof()
            self._record(sid, session, prompt, tools, reply, turn)
        return response

    async def make_prompt(self, session: Session, messages: list[Message], tools: Any) -> Prompt:
        """Token ids of a request, in a thread of its own kind: a long conversation takes a while to render."""
        if not messages:
            raise BadRequest("messages: there is none")
        work = functools.partial(session.history.prompt, self.tokenizer, messages, tools, appends=self.appends)
        try:
            return await _rendering.run(work)
        except UsageError as error:  # the chat template refuses these messages
            raise BadRequest(str(error)) from error

    def _parse(self, turn: TurnRecord, tools: Any) -> ParsedModelOutput:
        return parse_model_output(
            written_text(self.tokenizer, turn.output_ids),
            tools_schema=tools,
            tool_parser_name=self.tool_parser,
            reasoning_parser_name=self.reasoning_parser,
        )

    def _record(self, sid: str, session: Session, prompt: Prompt, tools: Any, reply: Reply, turn: TurnRecord) -> None:
        if self.store.get(sid) is not session:
            return  # It was finished meanwhile: a session that is opened again under its key must not get the turn.
        answer = reply.manager_message if turn.output_ids else None
        metadata = {"sid": sid, "tools": tools}
        self.manager.record_turn(
            sid, turn=turn, prompt_messages=prompt.messages, response_message=answer, metadata=metadata
        )
        if answer is not None:
            session.history.add(prompt.messages, tools, answer, turn)
        if self.debug_callback is not None:  # by the loop, which logs what it raises
            call = functools.partial(self.debug_callback, sid, prompt.messages, tools, reply.manager_message, turn)
            asyncio.get_running_loop().call_soon(call)

    def _report_ignored(self, session: Session) -> None:
        for name in session.ignored.keys() - self.ignored_fields.keys():
            self.logger.warning("%s: %r of a request has no effect: the run's sampling wins", self.log_prefix, name)
        self.ignored_fields.update(dict.fromkeys(session.ignored, 1))
