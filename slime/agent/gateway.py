"""One HTTP server for every agent of a run: OpenAI Chat and Responses and Anthropic Messages over one set of sessions.

A session is a random key that `open_session` makes. Its program sends the key as bearer token, as X-Api-Key, or in the
URL (/s/KEY/v1/...). A turn runs in a task of its own: a client that loses its connection and sends the request again
gets the answer of the first one, and a turn is recorded when a client has got it. docs/agents.md shows its use.

Wait graph: a request waits for the turn before it to be written and recorded, and for its own turn; a turn waits for a
rendering thread, for the end of an abort, and for the engine, `engine_timeout_s` in all.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from aiohttp import web

from slime.agent.adapters.anthropic import AnthropicAdapter
from slime.agent.adapters.common import ENGINE_TIMEOUT_S, MAX_BODY_BYTES, PING_INTERVAL_S, BaseAdapter
from slime.agent.adapters.openai import OpenAIAdapter
from slime.agent.adapters.session import (
    Answer,
    Budget,
    KeyedSession,
    Pending,
    Session,
    call_sglang_generate,
    forced_call,
    joined,
)
from slime.agent.adapters.sessions import Sessions, quiet_collector
from slime.agent.adapters.wire import (
    BadRequest,
    Refused,
    check_shape,
    digest_of,
    header,
    model_list,
    sid_from_bearer,
    unserved,
)
from slime.agent.aiohttp_threaded import AppHandle, FilteredAccessLogger, run_app_in_thread
from slime.agent.parsing import parser_names
from slime.agent.trajectory import TurnRecord
from slime.config.args import Args
from slime.processes.wait import wait_async
from slime.rollout.sampling.engine_request import router_url
from slime.rollout.sampling.generation import GenerateState
from slime.utils.errors import HttpError, UsageError
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample

__all__ = ["Budget", "Gateway", "shared_gateway"]
logger = logging.getLogger(__name__)
_ABANDONED_S = 60.0
"""How long a turn goes on after its client has gone, for the client to send the request again."""
_KEPT_ANSWERS = 64
_RESUBMIT_S = 0.2
_TOO_LONG = re.compile(r"\((\d+) tokens\).*context length \((\d+) tokens\)", re.DOTALL)
_STATUS_OF = dict.fromkeys(("max_turns", "budget", "length"), Sample.Status.TRUNCATED)
_STATUS_OF["aborted"] = Sample.Status.ABORTED
_REASON_OF = {Sample.Status.TRUNCATED: "length", Sample.Status.ABORTED: "aborted"}


class _Guarded(BaseAdapter):
    """A protocol of the gateway: known keys only, checked bodies, budgets, repeated requests."""

    gateway: Gateway
    prefixes: ClassVar[tuple[str, ...]] = ("", "/s/{key}")

    async def _read_body(self, request: web.Request) -> dict[str, Any]:
        self._key(request)  # before the body of somebody unknown is read
        return await super()._read_body(request)

    def _preprocess_body(self, body: dict[str, Any]) -> None:
        check_shape(body)
        super()._preprocess_body(body)

    def _key(self, request: web.Request) -> str:
        named = [request.match_info.get("key"), sid_from_bearer(request), header(request, "X-Api-Key")]
        keys = [key for key in named if key]
        for key in keys:
            if key in self.store and key not in self.closed:
                return key
        if any(key in self.closed for key in keys):
            raise _ended()
        what = "is no session's" if keys else "is missing: send it as bearer token, as X-Api-Key, or in /s/KEY/v1/..."
        raise Refused(f"the API key {what}", 401, "authentication_error", code="invalid_api_key", may_retry=False)

    def _session_id(self, request: web.Request, body: dict[str, Any]) -> str:
        return self._key(request)

    def _admit(self, request: web.Request, body: dict[str, Any]) -> tuple[str, Session]:
        key = self._key(request)
        return key, self.sessions.of_client(key)

    async def _answer(self, request: web.Request, body: dict[str, Any], sid: str, session: Session) -> Answer:
        """Return the answer of a request: of its own turn, or of that of an equal request before it."""
        assert isinstance(session, KeyedSession)
        named = header(request, "Idempotency-Key").encode()
        digest = digest_of(request.path, body)
        identity = named or digest
        is_again = named or header(request, "X-Stainless-Retry-Count") not in ("", "0")  # of OpenAI's and Anthropic's
        if is_again and (sent := session.sent.get(identity)) is not None:
            return _same(digest, *sent)
        if (pending := session.pending.get(identity)) is None:
            session.charge()
            task = asyncio.create_task(self._turn(request, body, sid, session, identity))
            pending = session.pending[identity] = Pending(task, digest)
            self.sessions.begin(sid, task)
        return await self._wait(session, identity, _same(digest, pending.digest, pending))

    async def _wait(self, session: KeyedSession, identity: bytes, pending: Pending) -> Answer:
        pending.num_waiting += 1
        this = asyncio.current_task()
        try:
            return await asyncio.shield(pending.task)
        except asyncio.CancelledError:
            if pending.task.cancelled() and this is not None and not this.cancelling():
                raise _ended() from None
            raise
        finally:
            pending.num_waiting -= 1
            if not pending.num_waiting and not pending.task.done():
                asyncio.get_running_loop().call_later(_ABANDONED_S, _end_if_abandoned, pending)

    async def _turn(
        self, request: web.Request, body: dict[str, Any], sid: str, session: KeyedSession, identity: bytes
    ) -> Answer:
        is_answered = False
        try:
            session.ignored.update(unserved(body))
            answer = await super()._answer(request, body, sid, session)
            if answer.turn.is_forced and answer.turn.finish_reason == "stop" and not _calls(answer):
                raise HttpError("the engine has not obeyed the grammar of tool_choice")
            is_answered = True
        except (RuntimeError, TimeoutError) as error:  # HttpError, an answer that is none, an abort without end
            raise self._refusal(session, error) from error
        finally:
            if not is_answered:
                session.num_turns -= 1
                session.pending.pop(identity, None)  # a failure may be tried again
        session.num_tokens += len(answer.turn.output_ids)
        is_cut = answer.turn.finish_reason == "length" and session.tokens_left <= 0
        session.end_reason = "budget" if is_cut else None
        answer.identity = identity
        return answer

    def _refusal(self, session: KeyedSession, error: Exception) -> Refused:
        """What a client reads of a failure of the engine."""
        if found := _TOO_LONG.search(str(error)):
            session.end_reason = "length"
            return self._too_long(int(found[1]), int(found[2]))
        if session.seconds_left <= 0:
            session.end_reason = "budget"
            message = f"the session has used up its budget of {session.budget.seconds:g} seconds"
            return Refused(message, 429, "rate_limit_error", code="budget_exceeded", may_retry=False)
        if isinstance(error, HttpError) and (error.status or 500) < 500:
            return BadRequest(f"the engine refuses the request: {error}"[:1000])
        session.end_reason = "transport"
        logger.error("a turn failed: %s", error)
        return Refused(f"the engine failed: {error}"[:1000], 503, "api_error")

    async def _generate(
        self, prompt_ids: Sequence[int], session: Session, body: dict[str, Any], *, sid: str, tools: Any
    ) -> TurnRecord:
        assert isinstance(session, KeyedSession)
        if 0 < session.max_context_tokens <= len(prompt_ids):
            session.end_reason = "length"
            raise self._too_long(len(prompt_ids), session.max_context_tokens)
        constraint = forced_call(session, body, tools, tokenizer=self.tokenizer, parser=self.tool_parser)
        ids, parts = prompt_ids, []
        deadline = time.monotonic() + self.engine_timeout_s
        while True:
            await self.gateway.until_generating(session)
            keys: dict[str, Any] = {"session_id": session.route, "constraint": constraint}
            part = await call_sglang_generate(
                ids, session, body, adapter=self, num_before=len(ids) - len(prompt_ids), **keys
            )
            if part.finish_reason != "abort":
                break
            if time.monotonic() > deadline:
                raise HttpError(f"the engine has aborted the turn again and again for {self.engine_timeout_s:g} s")
            await asyncio.sleep(_RESUBMIT_S)
            if not constraint:  # a grammar begins anew
                parts.append(part)
                ids = [*ids, *part.output_ids]
        turn = joined(prompt_ids, [*parts, part]) if parts else part
        return dataclasses.replace(turn, is_forced=True) if constraint else turn

    def _delivered(self, sid: str, session: Session, answer: Answer) -> None:
        assert isinstance(session, KeyedSession)
        if (pending := session.pending.pop(answer.identity, None)) is not None:
            session.sent[answer.identity] = pending.digest, answer
            if len(session.sent) > _KEPT_ANSWERS:
                session.sent.popitem(last=False)
        super()._delivered(sid, session, answer)


class _OpenAI(_Guarded, OpenAIAdapter):
    pass


class _Anthropic(_Guarded, AnthropicAdapter):
    pass


class Gateway:
    """Sessions of agents behind one address.

    Args:
        tokenizer: renders and decodes.
        sglang_url: of a router or an engine.
        tool_parser: SGLang's name; None knows only calls in XML.
        reasoning_parser: SGLang's name; None leaves thoughts in the text.
        history: "append" continues a session's own tokens; "render" has the template render every request.
        host: address to bind.
        port: 0 takes a free one.
        fork_threshold_tokens: of `TrajectoryManager`.
        model_name: what /v1/models names; requests may name any.
        max_body_bytes: of a request.
        engine_timeout_s: longest time of one turn in the engine, retries included.
        ping_interval_s: seconds between signs of life in a stream while the engine works.
        args: the run's, where the engine returns routed experts.
        is_ending: says whether the rollout is being aborted. Evaluations wait for the end of that.
        keeps_aborted: the turns of other sessions wait, too (--partial-rollout); else they end.
    """

    def __init__(
        self,
        *,
        tokenizer: Any,
        sglang_url: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        history: str = "append",
        host: str = "127.0.0.1",
        port: int = 0,
        fork_threshold_tokens: int | None = None,
        model_name: str = "slime-actor",
        max_body_bytes: int = MAX_BODY_BYTES,
        engine_timeout_s: float = ENGINE_TIMEOUT_S,
        ping_interval_s: float = PING_INTERVAL_S,
        args: Args | None = None,
        is_ending: Callable[[], bool] = lambda: False,
        keeps_aborted: bool = False,
    ) -> None:
        self.host, self.port, self.model_name = host, port, model_name
        self.is_ending, self.keeps_aborted, self.engine_timeout_s = is_ending, keeps_aborted, engine_timeout_s
        self.sessions = Sessions(tokenizer, history=history, fork_threshold_tokens=fork_threshold_tokens, args=args)
        self.app = web.Application(client_max_size=max_body_bytes)
        self._created = int(time.time())
        shared: dict[str, Any] = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
        shared |= {"engine_timeout_s": engine_timeout_s, "ping_interval_s": ping_interval_s}
        for kind in (_OpenAI, _Anthropic):
            protocol = kind(tokenizer=tokenizer, sglang_url=sglang_url, sessions=self.sessions, **shared)
            protocol.gateway = self
            for prefix in protocol.prefixes:
                protocol.add_routes(self.app, prefix)
        for prefix in _Guarded.prefixes:
            self.app.router.add_get(f"{prefix}/healthz", self._health)
            self.app.router.add_get(f"{prefix}/v1/models", self._models)
            self.app.router.add_get(f"{prefix}/v1/models/{{model:.*}}", self._models)
        self._handle: AppHandle | None = None

    @property
    def url(self) -> str:
        """Address once started: OpenAI's clients take it with "/v1", Anthropic's as it is."""
        return f"http://{self.host}:{self.port}"

    def start(self) -> Gateway:
        """Serve from a thread and an event loop of its own.

        Raises:
            UsageError: the port is taken, or the address is none of this host's.
        """
        keys = {"handler_cancellation": True, "access_log_class": FilteredAccessLogger}
        try:
            self._handle = run_app_in_thread(
                self.app, host=self.host, port=self.port, thread_name="agent-gateway", runner_kwargs=keys
            )
        except OSError as error:
            raise UsageError(
                f"the agents' gateway cannot listen on {self.host}:{self.port} (--agent-gateway-host, "
                f"--agent-gateway-port): {error.strerror or error}; port 0 takes a free one"
            ) from error
        self.port, self.sessions.loop = self._handle.port, self._handle.loop
        return self

    def stop(self) -> None:
        """End the server; its sessions can still be finished."""
        if self._handle is not None:
            loop, handle, self._handle = self._handle.loop, self._handle, None
            with contextlib.suppress(RuntimeError):  # it was stopped already
                loop.call_soon_threadsafe(self._cancel_all)
            handle.stop()

    def _cancel_all(self) -> None:
        for tasks in self.sessions.inflight.values():
            for task in tasks:
                task.cancel()

    def open_session(
        self,
        *,
        sampling: dict[str, Any],
        max_context_tokens: int = 0,
        budget: Budget = Budget(),  # noqa: B008 - it cannot be changed
        evaluation: bool = False,
    ) -> str:
        """Begin a session; any thread may.

        Args:
            sampling: the run's sampling parameters, SGLang's; a client cannot change those that they name.
            max_context_tokens: longest prompt and answer together; 0 is no limit.
            budget: what it may use up.
            evaluation: its samples say so, and the end of a training rollout does not end it.

        Returns:
            A random key, which is all that the session's program needs to know.
        """
        session = KeyedSession(dict(sampling), max_context_tokens, budget=budget, evaluation=evaluation)
        return self.sessions.open(None, session)

    def end_reason(self, key: str) -> str | None:
        """What has ended an open session: "max_turns", "length", "budget", "transport", "aborted"; None if nothing."""
        session = self.sessions.store.get(key)
        return session.end_reason if session else None

    async def finish_session(
        self,
        key: str,
        *,
        base_sample: Sample,
        reward: float | dict[str, Any] | None = 0.0,
        extra_metadata: dict[str, Any] | None = None,
    ) -> list[Sample]:
        """End a session and return its samples; a second call returns none. Any event loop may call it.

        Their end_reason is what ended the session, else how their last turn ended; their status follows from it. After
        a failure of the engine their reward is not to be trusted.

        Args:
            key: of the session.
            base_sample: gives index, group, prompt and label.
            reward: of every sample.
            extra_metadata: added to every sample's metadata.
        """
        session = self.sessions.store.get(key) or Session()
        samples = await self.sessions.finish(
            key, base_sample=base_sample, reward=reward, extra_metadata=extra_metadata
        )
        for sample in samples:
            sample.status = _STATUS_OF.get(session.end_reason or "", sample.status)
            sample.end_reason = session.end_reason or _REASON_OF.get(sample.status, "done")
            sample.reward_is_trusted = session.end_reason != "transport"
            sample.metadata["agent"]["evaluation"] = session.evaluation
        if session.evaluation:
            counts = (session.num_turns, session.num_tokens, session.end_reason or "done", reward)
            logger.info("evaluation session: %d turns, %d tokens, end %s, reward %s", *counts)
        return samples

    async def drop_session(self, key: str) -> None:
        """End a session and throw away what was recorded."""
        await self.sessions.drop(key, wait_timeout=0.0)

    async def until_generating(self, session: Session) -> None:
        """Wait while a rollout is being aborted, where the session outlives that.

        Raises:
            Refused: it does not.
        """

        async def is_over() -> bool:
            return not self.is_ending()

        if not self.is_ending():
            return
        if not session.evaluation and not self.keeps_aborted:
            session.end_reason = "aborted"
            raise Refused("the rollout has ended", 503, "api_error", code="rollout_ended", may_retry=False)
        await wait_async("the abort of a rollout to end", self.engine_timeout_s, is_over, interval_s=_RESUBMIT_S)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"ok": True, "sessions": len(self.sessions.store)})

    async def _models(self, request: web.Request) -> web.Response:
        listed = model_list(self.model_name, created=self._created)
        asked = request.match_info.get("model")
        return web.json_response(listed if asked is None else {**listed["data"][0], "id": asked})


class _Shared(metaclass=SingletonMeta):
    """The gateway of this process."""

    def __init__(self, args: Args) -> None:
        state = GenerateState(args)
        parsers = parser_names(state.tokenizer, args.sglang_tool_call_parser, args.sglang_reasoning_parser)
        self.gateway = Gateway(
            tokenizer=state.tokenizer,
            sglang_url=router_url(args),
            tool_parser=parsers[0],
            reasoning_parser=parsers[1],
            history=args.agent_history,
            host=args.agent_gateway_host,
            port=args.agent_gateway_port,
            args=args,
            is_ending=lambda: state.aborted,
            keeps_aborted=args.partial_rollout,
        ).start()
        quiet_collector()


async def shared_gateway(args: Args) -> Gateway:
    """The gateway of this process, started at first use.

    Args:
        args: reads the router's address, --agent-history, --agent-gateway-host, --agent-gateway-port, the engine's
            parsers (by default those that fit the chat template), and what `GenerateState` reads.

    Raises:
        UsageError: the port is taken.
    """
    return _Shared(args).gateway


def _ended() -> Refused:
    return Refused("this session has ended", 410, "session_closed", code="session_closed", may_retry=False)


def _same(digest: bytes, known: bytes, value: Any) -> Any:
    if digest != known:
        raise BadRequest("this Idempotency-Key was sent with another request")
    return value


def _end_if_abandoned(pending: Pending) -> None:
    if not pending.num_waiting:
        pending.task.cancel()


def _calls(answer: Answer) -> bool:
    return answer.reply.finish_reason == "tool_calls"
