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
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import orjson
from aiohttp import web

from slime.agent.adapters.session import Answer, Reply, Session, call_sglang_generate
from slime.agent.adapters.sessions import Sessions, rendering
from slime.agent.adapters.wire import (
    BadRequest,
    Refused,
    flatten_content,
    has_begun,
    keep_alive,
    manager_finish_reason,
    model_list,
    send_events,
    sid_from_bearer,
    sid_from_body,
    tool_call_dict,
)
from slime.agent.history import Prompt
from slime.agent.parsing import ParsedModelOutput, parse_model_output, written_text
from slime.agent.pictures import Picture, width
from slime.agent.trajectory import Message, TurnRecord
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
_CLIENT_GONE = 499
_SHORT_OUTPUT = 2048  # tokens, which are parsed in less time than a thread takes to be woken
_NO_TOOLS = ("none", {"type": "none"})
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
        sessions: those of another adapter, to serve them, too; None makes new ones.
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
        sessions: Sessions | None = None,
    ) -> None:
        self.sessions = sessions or Sessions(tokenizer, history=history, fork_threshold_tokens=fork_threshold_tokens)
        self.store, self.inflight = self.sessions.store, self.sessions.inflight
        self.closed, self.manager = self.sessions.closed, self.sessions.manager
        self.tokenizer = tokenizer
        self.sglang_url = sglang_url.rstrip("/")
        self.tool_parser, self.reasoning_parser = tool_parser, reasoning_parser
        self.max_turns_per_sid, self.debug_callback = max_turns_per_sid, debug_callback
        self.engine_timeout_s, self.ping_interval_s = engine_timeout_s, ping_interval_s
        self.ignored_fields: Counter[str] = Counter()
        self._has_parsed = False
        self.app = web.Application(client_max_size=MAX_BODY_BYTES)
        self.app.router.add_get("/healthz", self._health)
        self.app.router.add_get("/v1/models", self._health)
        self._register_routes(self.app)

    def _register_routes(self, app: web.Application) -> None:
        raise NotImplementedError

    def add_routes(self, app: web.Application, prefix: str) -> None:
        """Serve the protocol's routes from another application, below a prefix."""
        for route in self.app.router.routes():
            if route.method == "POST" and route.resource is not None:
                app.router.add_post(prefix + route.resource.canonical, route.handler)

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

    def _too_long(self, num_tokens: int, limit: int) -> Refused:
        """Build the error that the protocol's clients take for a context that is full."""
        raise NotImplementedError

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"ok": True, **model_list("slime-actor", created=0)})

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
        return self.sessions.open(sid, Session(dict(sampling_defaults or {}), max_context_tokens))

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
        return await self.sessions.finish(
            sid, base_sample=base_sample, reward=reward, extra_metadata=extra_metadata, wait_timeout=wait_timeout
        )

    async def drop_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """End a session and throw away what was recorded."""
        await self.sessions.drop(sid, wait_timeout=wait_timeout)

    async def shutdown_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """Refuse further requests of a session, and wait for those that run; what is left then is cancelled."""
        await self.sessions.shutdown(sid, wait_timeout=wait_timeout)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request of the protocol; errors become the client's."""
        self.sessions.loop = asyncio.get_running_loop()
        try:
            body = await self._read_body(request)
            sid, session = self._admit(request, body)
            task = asyncio.current_task()
            assert task is not None
            self.sessions.begin(sid, task)
            return await self._run_turn(request, body, sid, session)
        except ConnectionError:
            return web.Response(status=_CLIENT_GONE)
        except Refused as error:
            return await self._fail(request, error)
        except (RuntimeError, ValueError) as error:  # of the engine, the template, a parser's name
            self.logger.error("%s: a turn failed: %s: %s", self.log_prefix, type(error).__name__, error)
            return await self._fail(request, Refused(f"{type(error).__name__}: {error}"[:1000], 500, "api_error"))

    async def _fail(self, request: web.Request, error: Refused) -> web.StreamResponse:
        return await send_events(request, [("error", error.body)]) if has_begun(request) else error.response()

    async def read_json(self, request: web.Request) -> Any:
        """The body of a request.

        Raises:
            Refused: it is too long, broken off, or no JSON.
        """
        try:
            data = await request.read()
        except web.HTTPRequestEntityTooLarge:
            limit = f"the body has more than {request.client_max_size} bytes"
            raise Refused(limit, 413, "request_too_large") from None
        except web.RequestPayloadError as error:
            raise BadRequest(f"the body cannot be read: {error}") from None
        try:
            return _loads(data)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is no JSON: {error}") from None

    async def _read_body(self, request: web.Request) -> dict[str, Any]:
        body = await self.read_json(request)
        if not isinstance(body, dict):
            raise BadRequest(f"the body must be a JSON object, not a {type(body).__name__}")
        if body.get("n") not in (None, 1):
            message = "a session has one continuation; send n requests, each with an Idempotency-Key of its own"
            raise BadRequest(f"n {body['n']}: {message}", param="n")
        self._preprocess_body(body)
        return body

    def _admit(self, request: web.Request, body: dict[str, Any]) -> tuple[str, Session]:
        """Find the key of a request and its session.

        Raises:
            Refused: the session has ended, or has had its turns.
        """
        sid = self._session_id(request, body)
        if sid in self.closed:
            raise Refused("session closed", 503, "session_closed")
        session = self.sessions.of_client(sid)
        if self.max_turns_per_sid is not None and session.num_turns >= self.max_turns_per_sid:
            raise Refused(f"the session has had its {self.max_turns_per_sid} turns", 429, "rate_limit_error")
        session.num_turns += 1
        return sid, session

    async def _run_turn(
        self, request: web.Request, body: dict[str, Any], sid: str, session: Session
    ) -> web.StreamResponse:
        stream = body.get("stream") is True or "text/event-stream" in request.headers.get("Accept", "")
        async with session.lock:  # the answer before this request is recorded
            pass
        async with keep_alive(request, self.ping_interval_s) if stream else contextlib.nullcontext():
            answer = await self._answer(request, body, sid, session)
        self._report_ignored(session)
        async with session.lock:
            if request.transport is None or request.transport.is_closing():
                return web.Response(status=_CLIENT_GONE)
            counts = width(answer.turn.prompt_ids, answer.turn.images), len(answer.turn.output_ids)
            response = await self._respond(request, body, answer.reply, *counts, stream)
            if not response.prepared:
                await response.prepare(request)
            await response.write_eof()
            self._delivered(sid, session, answer)
        return response

    async def _answer(self, request: web.Request, body: dict[str, Any], sid: str, session: Session) -> Answer:
        """Have the engine answer a request."""
        messages, tools = await self._chat_of(request, body, session)
        prompt = await self.make_prompt(session, messages, tools)
        images = self.sessions.images_of(session, prompt)
        more: dict[str, Any] = {"images": images} if images else {}
        turn = await self._generate(prompt.ids, session, body, sid=sid, tools=tools, **more)
        may_call = body.get("tool_choice") not in _NO_TOOLS
        shown = tools if may_call else None
        if self._has_parsed and len(turn.output_ids) < _SHORT_OUTPUT:
            parsed = self._parse(turn, shown)
        else:  # the first time, SGLang's parsers are imported
            parsed = await rendering.run(self._parse, turn, shown)
            self._has_parsed = True
        if parsed.ill_formed:
            turn = dataclasses.replace(turn, ill_formed=True)
        return Answer(prompt, tools, turn, self._build_reply(parsed, turn.finish_reason, messages, tools))

    async def _chat_of(
        self, request: web.Request, body: dict[str, Any], session: Session
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """Chat messages and tools of a request."""
        messages, tools = self._translate(body)
        return await self.sessions.take_images(session, messages), tools

    async def _generate(
        self,
        prompt_ids: Sequence[int],
        session: Session,
        body: dict[str, Any],
        *,
        sid: str,
        tools: Any,
        images: Sequence[Picture] = (),
    ) -> TurnRecord:
        more: dict[str, Any] = {"images": images} if images else {}
        return await call_sglang_generate(prompt_ids, session, body, adapter=self, session_id=sid, **more)

    def _delivered(self, sid: str, session: Session, answer: Answer) -> None:
        """A client has an answer: record it, and tell the callback."""
        if self.sessions.record(sid, session, answer) and self.debug_callback is not None:
            messages, reply = answer.prompt.messages, answer.reply.manager_message
            call = functools.partial(self.debug_callback, sid, messages, answer.tools, reply, answer.turn)
            asyncio.get_running_loop().call_soon(call)  # the loop logs what it raises

    async def make_prompt(self, session: Session, messages: list[Message], tools: Any) -> Prompt:
        """Token ids of a request; where much has to be rendered, in a thread of its own kind."""
        if not messages:
            raise BadRequest("messages: there is none", param="messages")
        appends, match = self.sessions.appends, session.history.match(messages, tools)
        work = functools.partial(session.history.prompt, self.tokenizer, match, appends=appends)
        try:
            return work() if appends and match.is_short else await rendering.run(work)
        except UsageError as error:  # the chat template refuses these messages
            raise BadRequest(str(error)) from error

    def _parse(self, turn: TurnRecord, tools: Any) -> ParsedModelOutput:
        return parse_model_output(
            written_text(self.tokenizer, turn.output_ids),
            tools_schema=tools,
            tool_parser_name=self.tool_parser,
            reasoning_parser_name=self.reasoning_parser,
        )

    def _report_ignored(self, session: Session) -> None:
        if not session.ignored:
            return
        for name in session.ignored.keys() - self.ignored_fields.keys():
            self.logger.warning("%s: %r of a request has no effect: the run's sampling wins", self.log_prefix, name)
        self.ignored_fields.update(dict.fromkeys(session.ignored, 1))


def _loads(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:  # json takes more: NaN, lone surrogates
        return json.loads(data)
