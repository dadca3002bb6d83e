"""The gateway's part of each protocol: keys, checks of bodies, budgets, repeated requests and aborts."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from aiohttp import web

from slime.agent.adapters.common import BaseAdapter
from slime.agent.adapters.session import (
    Answer,
    Pending,
    Session,
    call_sglang_generate,
    forced_call,
    joined,
)
from slime.agent.adapters.wire import (
    BadRequest,
    Refused,
    check_shape,
    header,
    sid_from_bearer,
    unserved,
)
from slime.agent.history import Intake, Seen
from slime.agent.pictures import Picture, width
from slime.agent.trajectory import Message, TurnRecord
from slime.utils.errors import HttpError

if TYPE_CHECKING:
    from slime.agent.gateway import Gateway

logger = logging.getLogger(__name__)
T = TypeVar("T")
RESUBMIT_S = 0.2
_ABANDONED_S = 60.0
"""How long a turn goes on after its client has gone, for the client to send the request again."""
_KEPT_ANSWERS = 64
_TOO_LONG = re.compile(r"\((\d+) tokens\).*context length \((\d+) tokens\)", re.DOTALL)
_INTAKE = web.RequestKey("intake", Intake)


class Guarded(BaseAdapter):
    """A protocol of the gateway: known keys only, checked bodies, budgets, repeated requests."""

    gateway: Gateway
    prefixes: ClassVar[tuple[str, ...]] = ("", "/s/{key}")

    async def _read_body(self, request: web.Request) -> dict[str, Any]:
        key = self.key_of(request)  # before the body of somebody unknown is read
        body = await super()._read_body(request)
        session = self.store.get(key)
        intake = request[_INTAKE] = Intake(session.seen if session else Seen(), request.path, body)
        check_shape(body, num_known=intake.num_known, takes_images=self.sessions.pictures is not None)
        if not intake.num_known:
            super()._preprocess_body(body)
        return body

    def _preprocess_body(self, body: dict[str, Any]) -> None:
        """Change nothing yet: it has to be checked first."""

    async def _chat_of(
        self, request: web.Request, body: dict[str, Any], session: Session
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        intake = request[_INTAKE]
        messages, tools = self._translate(intake.new_body(body))
        seen = session.seen = intake.seen_as(await self.sessions.take_images(session, messages), tools)
        return seen.messages, seen.tools

    def key_of(self, request: web.Request) -> str:
        """The key of an open session that a request bears.

        Raises:
            Refused: it bears none.
        """
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
        return self.key_of(request)

    def _admit(self, request: web.Request, body: dict[str, Any]) -> tuple[str, Session]:
        key = self.key_of(request)
        return key, self.sessions.of_client(key)

    async def _answer(self, request: web.Request, body: dict[str, Any], sid: str, session: Session) -> Answer:
        """Return the answer of a request: of its own turn, or of that of an equal request before it."""
        named = header(request, "Idempotency-Key").encode()
        digest = request[_INTAKE].digest(body)
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

    async def _wait(self, session: Session, identity: bytes, pending: Pending) -> Answer:
        pending.num_waiting += 1
        try:
            return await until_ended(pending.task)
        finally:
            pending.num_waiting -= 1
            if not pending.num_waiting and not pending.task.done():
                asyncio.get_running_loop().call_later(_ABANDONED_S, _end_if_abandoned, pending)

    async def _turn(
        self, request: web.Request, body: dict[str, Any], sid: str, session: Session, identity: bytes
    ) -> Answer:
        is_answered = False
        try:
            takes_images = self.sessions.pictures is not None
            if kinds := unserved(body, request[_INTAKE].new, takes_images=takes_images):
                session.ignored.update(kinds)
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

    def _refusal(self, session: Session, error: Exception) -> Refused:
        """Return the answer that tells a client of an engine's failure; notes why the session ends."""
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
        self,
        prompt_ids: Sequence[int],
        session: Session,
        body: dict[str, Any],
        *,
        sid: str,
        tools: Any,
        images: Sequence[Picture] = (),
    ) -> TurnRecord:
        if 0 < session.max_context_tokens <= (num_tokens := width(prompt_ids, images)):
            session.end_reason = "length"
            raise self._too_long(num_tokens, session.max_context_tokens)
        constraint = forced_call(session, body, tools, tokenizer=self.tokenizer, parser=self.tool_parser)
        ids, parts = prompt_ids, []
        deadline = time.monotonic() + self.engine_timeout_s
        while True:
            await self.gateway.until_generating(session)
            keys: dict[str, Any] = {"session_id": session.route, "constraint": constraint, "images": images}
            part = await call_sglang_generate(
                ids, session, body, adapter=self, num_before=len(ids) - len(prompt_ids), **keys
            )
            if part.finish_reason != "abort":
                break
            if time.monotonic() > deadline:
                raise HttpError(f"the engine has aborted the turn again and again for {self.engine_timeout_s:g} s")
            await asyncio.sleep(RESUBMIT_S)
            if not constraint:  # a grammar begins anew
                parts.append(part)
                ids = [*ids, *part.output_ids]
        turn = joined(prompt_ids, [*parts, part]) if parts else part
        return dataclasses.replace(turn, is_forced=True) if constraint else turn

    def _delivered(self, sid: str, session: Session, answer: Answer) -> None:
        if (pending := session.pending.pop(answer.identity, None)) is not None:
            session.sent[answer.identity] = pending.digest, answer
            if len(session.sent) > _KEPT_ANSWERS:
                session.sent.popitem(last=False)
        super()._delivered(sid, session, answer)


async def until_ended(task: asyncio.Task[T]) -> T:
    """Wait for a task of a session, which goes on where the client that waits has gone.

    Raises:
        Refused: the end of the session has cancelled it.
    """
    this = asyncio.current_task()
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.cancelled() and this is not None and not this.cancelling():
            raise _ended() from None
        raise


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
