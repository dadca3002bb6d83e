"""One HTTP server for every agent of a run: OpenAI Chat and Responses and Anthropic Messages over one set of sessions.

A session is a random key that `open_session` makes. Its program sends the key as bearer token, as X-Api-Key, or in the
URL (/s/KEY/v1/...). A turn runs in a task of its own: a client that loses its connection and sends the request again
gets the answer of the first one, and a turn is recorded when a client has got it. docs/agents.md shows its use.

Wait graph: a request waits for the turn before it to be written and recorded, and for its own turn; a turn waits for a
rendering thread, for the end of an abort, and for the engine, `engine_timeout_s` in all. A message of an MCP client
waits for its call (`slime.agent.mcp_endpoint`), and the end of its session for both.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from slime.agent import mcp_endpoint
from slime.agent.adapters.anthropic import AnthropicAdapter
from slime.agent.adapters.common import ENGINE_TIMEOUT_S, MAX_BODY_BYTES, PING_INTERVAL_S
from slime.agent.adapters.guarded import RESUBMIT_S, Guarded, until_ended
from slime.agent.adapters.openai import OpenAIAdapter
from slime.agent.adapters.session import Budget, Session
from slime.agent.adapters.sessions import Sessions, quiet_collector
from slime.agent.adapters.wire import Refused, json_answer, model_list
from slime.agent.aiohttp_threaded import AppHandle, FilteredAccessLogger, run_app_in_thread
from slime.agent.mcp_endpoint import McpEndpoint
from slime.agent.parsing import parser_names
from slime.agent.pictures import Pictures
from slime.config.args import Args
from slime.processes.wait import wait_async
from slime.rollout.sampling.engine_request import router_url
from slime.rollout.sampling.generation import GenerateState
from slime.utils.errors import UsageError
from slime.utils.misc import SingletonMeta
from slime.utils.processing_utils import image_options
from slime.utils.types import Sample

__all__ = ["Budget", "Gateway", "shared_gateway"]
logger = logging.getLogger(__name__)
_STATUS_OF = dict.fromkeys(("max_turns", "budget", "length"), Sample.Status.TRUNCATED)
_STATUS_OF["aborted"] = Sample.Status.ABORTED
_REASON_OF = {Sample.Status.TRUNCATED: "length", Sample.Status.ABORTED: "aborted"}


class _OpenAI(Guarded, OpenAIAdapter):
    pass


class _Anthropic(Guarded, AnthropicAdapter):
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
        pictures: opens the images of requests; None where the model sees none.
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
        pictures: Pictures | None = None,
    ) -> None:
        self.host, self.port, self.model_name = host, port, model_name
        self.is_ending, self.keeps_aborted, self.engine_timeout_s = is_ending, keeps_aborted, engine_timeout_s
        options: dict[str, Any] = {"history": history, "fork_threshold_tokens": fork_threshold_tokens}
        self.sessions = Sessions(tokenizer, args=args, pictures=pictures, **options)
        self.app = web.Application(client_max_size=max_body_bytes)
        self._created = int(time.time())
        shared: dict[str, Any] = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
        shared |= {"engine_timeout_s": engine_timeout_s, "ping_interval_s": ping_interval_s}
        for kind in (_OpenAI, _Anthropic):
            protocol = kind(tokenizer=tokenizer, sglang_url=sglang_url, sessions=self.sessions, **shared)
            protocol.gateway = self
            for prefix in protocol.prefixes:
                protocol.add_routes(self.app, prefix)
            self._protocol = protocol
        self.mcp: McpEndpoint | None = None
        for prefix in Guarded.prefixes:
            self.app.router.add_post(prefix + mcp_endpoint.PATH, self._mcp)
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
        """End the server; its sessions can still be finished, but what their agents do without it says nothing."""
        if self._handle is not None:
            for session in list(self.sessions.store.values()):
                session.is_cut_off = True
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
        session = Session(dict(sampling), max_context_tokens, budget=budget, evaluation=evaluation)
        return self.sessions.open(None, session)

    def end_reason(self, key: str) -> str | None:
        """What has ended an open session, one of `slime.utils.types.END_REASONS`; None if nothing."""
        session = self.sessions.store.get(key)
        return _end_reason(session) if session else None

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
        reason = _end_reason(session)
        for sample in samples:
            sample.status = _STATUS_OF.get(reason or "", sample.status)
            sample.end_reason = reason or _REASON_OF.get(sample.status, "done")
            sample.reward_is_trusted = reason not in ("transport", "env_error")
            sample.metadata |= session.tool_calls.metadata
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
        await wait_async("the abort of a rollout to end", self.engine_timeout_s, is_over, interval_s=RESUBMIT_S)

    async def _mcp(self, request: web.Request) -> web.Response:
        """Answer a message of an agent's MCP client; a call goes on without its client, as the protocol has it."""
        try:
            self._protocol.key_of(request)  # before the body of somebody unknown is read
            if self.mcp is None:
                raise Refused("this run has no MCP servers (mcp of --custom-config-path)", 404, "not_found_error")
            message = await self._protocol.read_json(request)
            key = self._protocol.key_of(request)  # the session may have ended meanwhile
            task = asyncio.create_task(self.mcp.answer(message, self.sessions.of_client(key)))
            self.sessions.begin(key, task)
            answer = await until_ended(task)
        except Refused as error:
            return error.response()
        return web.Response(status=202) if answer is None else json_answer(answer)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"ok": True, "sessions": len(self.sessions.store)})

    async def _models(self, request: web.Request) -> web.Response:
        listed = model_list(self.model_name, created=self._created)
        asked = request.match_info.get("model")
        return web.json_response(listed if asked is None else {**listed["data"][0], "id": asked})


class SharedGateway(metaclass=SingletonMeta):
    """The gateway of this process."""

    def __init__(self, args: Args) -> None:
        state = GenerateState(args)
        sees_images = args.multimodal_keys and state.processor is not None
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
            pictures=Pictures(state.processor, state.tokenizer, image_options(args)) if sees_images else None,
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
    return SharedGateway(args).gateway


def _end_reason(session: Session) -> str | None:
    if session.is_cut_off:
        return "transport"
    return "env_error" if session.tool_failure else session.end_reason
