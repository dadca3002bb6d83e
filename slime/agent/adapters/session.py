"""A session of an agent: its sampling parameters, its budget, its history, and its calls of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from slime.agent.adapters.wire import BadRequest, Refused, new_id, tool_choice
from slime.agent.history import History, Prompt, Seen, SharedIds
from slime.agent.parsing import begins_thought, call_grammar
from slime.agent.pictures import Picture, width
from slime.agent.trajectory import TurnRecord
from slime.processes.progress import went_on
from slime.rollout.sampling.engine_request import AFFINITY_HEADER, saw_all, settled, tokens_of
from slime.utils.errors import HttpError, UsageError
from slime.utils.http_utils import post
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.agent.adapters.common import BaseAdapter

DEFAULT_SID = "default"
_GRAMMARS = ("regex", "ebnf", "json_schema", "structural_tag")
_ABORT_TIMEOUT_S = 5.0

_BASE: dict[str, Any] = {
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
    "max_new_tokens": 4096,
}
_CLIENT_KEYS = ("temperature", "top_p", "top_k")
# They would change what is sampled, and the trainer would not know.
_UNUSED_KEYS = ("presence_penalty", "frequency_penalty", "logit_bias", "seed", "response_format", "logprobs")
_NEUTRAL: tuple[Any, ...] = (None, 0, {}, "auto", "none", {"type": "auto"}, {"type": "none"}, {"type": "text"})


class Budget(BaseModel):
    """What a session may use up; None is no limit.

    Attributes:
        turns: answers of the engine.
        tokens: generated tokens in all. Turns that run at once are each held to what is left when they begin.
        seconds: of wall time since the session was opened.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    turns: Annotated[int, Field(ge=1)] | None = None
    tokens: Annotated[int, Field(ge=1)] | None = None
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


@dataclass
class Session:
    """One session of an adapter.

    Attributes:
        sampling_defaults: the run's sampling parameters; a client cannot change those that it names.
        max_context_tokens: longest prompt and answer together; 0 is no limit.
        is_open: `open_session` made it; others are forgotten when they have been idle for long.
        num_turns: requests so far.
        ignored: fields of requests without effect, and how often they came.
        lock: held while an answer is written and recorded, and for a moment by the request that follows it.
        budget: what the gateway allows.
        evaluation: its samples are not trained on.
        num_tokens: generated so far.
        is_cut_off: its server has been stopped.
        images: those of its requests, by name.
        end_reason: what last refused or failed a turn, one of `slime.utils.types.END_REASONS`; an answer resets it.
        route: what the router knows a session of the gateway by; its key is a secret.
        pending: turns of the gateway that no client has got, by the identity of their request.
        sent: the latest of those that were sent, with the digest of their request.
        seen: its latest request.
        tool_calls: counts calls of MCP servers in its metadata.
        tool_failure: why such a server is gone; then no end of the session can be trusted.
    """

    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    max_context_tokens: int = 0
    is_open: bool = False
    num_turns: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    history: History = field(default_factory=History)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    used_at: float = field(default_factory=time.monotonic)
    opened_at: float = field(default_factory=time.monotonic)
    budget: Budget = Budget()
    evaluation: bool = False
    num_tokens: int = 0
    end_reason: str | None = None
    is_cut_off: bool = False
    images: dict[str, Picture] = field(default_factory=dict)
    route: str = field(default_factory=lambda: uuid.uuid4().hex)
    pending: dict[bytes, Pending] = field(default_factory=dict)
    sent: OrderedDict[bytes, tuple[bytes, Answer]] = field(default_factory=OrderedDict)
    seen: Seen = field(default_factory=Seen)
    tool_calls: Sample = field(default_factory=Sample)
    tool_failure: str = ""

    @property
    def tokens_left(self) -> float:
        """Tokens that may still be generated."""
        return float("inf") if self.budget.tokens is None else self.budget.tokens - self.num_tokens

    @property
    def seconds_left(self) -> float:
        """Seconds until the session's wall time is over."""
        if self.budget.seconds is None:
            return float("inf")
        return self.budget.seconds - (time.monotonic() - self.opened_at)

    def end(self) -> None:
        """Cancel the turns whose clients have gone; called on the server's loop when the session ends."""
        for pending in self.pending.values():
            if not pending.num_waiting:
                pending.task.cancel()

    def charge(self) -> None:
        """Count a turn.

        Raises:
            Refused: the budget is used up.
        """
        if self.budget.turns is not None and self.num_turns >= self.budget.turns:
            reason, what = "max_turns", f"{self.budget.turns} turns"
        elif self.tokens_left <= 0:
            reason, what = "budget", f"{self.budget.tokens} generated tokens"
        elif self.seconds_left <= 0:
            reason, what = "budget", f"{self.budget.seconds:g} seconds"
        else:
            self.num_turns += 1
            return
        self.end_reason = reason
        message = f"the session has used up its budget of {what}"
        raise Refused(message, 429, "rate_limit_error", code="budget_exceeded", may_retry=False)


@dataclass(frozen=True)
class Reply:
    """An answer: as the tree keeps it, how it ended, and as the client gets it."""

    manager_message: dict[str, Any]
    finish_reason: str
    wire: Any


@dataclass
class Answer:
    """A turn that the engine has answered; it is recorded once a client has it."""

    prompt: Prompt
    tools: Any
    turn: TurnRecord
    reply: Reply
    is_recorded: bool = False
    identity: bytes = b""


@dataclass
class Pending:
    """A turn under way, or one whose answer no client has got yet."""

    task: asyncio.Task[Answer]
    digest: bytes
    num_waiting: int = 0


def sampling_params(
    session: Session, body: dict[str, Any], *, max_token_keys: Sequence[str], stop_keys: Sequence[str]
) -> dict[str, Any]:
    """SGLang's sampling parameters of one request.

    The run's win: with another temperature than the trainer's, log-probs would not be those of the policy. A client
    may ask for fewer tokens and for more stops. What else it asks for is counted in `session.ignored`.
    """
    params = {**_BASE, **session.sampling_defaults}
    asked = next((body[key] for key in max_token_keys if body.get(key) is not None), None)
    if asked is not None:
        if not isinstance(asked, int) or asked < 1:
            raise BadRequest(f"{' / '.join(max_token_keys)}: {asked!r} is no positive number of tokens")
        params["max_new_tokens"] = min(params["max_new_tokens"], asked)
    for key in _CLIENT_KEYS:
        value = body.get(key)
        if value is not None and key not in session.sampling_defaults:
            params[key] = value
        elif value is not None and value != session.sampling_defaults[key]:
            session.ignored[key] += 1
    stops = next((body[key] for key in stop_keys if body.get(key)), None)
    if stops:
        params["stop"] = list(dict.fromkeys([*_texts(params.get("stop")), *_texts(stops)]))
    if unused := [key for key in _UNUSED_KEYS if key in body and body[key] not in _NEUTRAL]:
        session.ignored.update(unused)
    return params


def forced_call(
    session: Session, body: dict[str, Any], tools: Any, *, tokenizer: Any, parser: str | None
) -> dict[str, Any] | None:
    """The sampling parameters that make a request's tool_choice; None where the model chooses.

    Raises:
        BadRequest: it cannot be made.
    """
    kind, name = tool_choice(body)
    if kind in ("auto", "none"):
        return None
    known = [tool["function"]["name"] for tool in tools or ()]
    wanted = [tool for tool in tools or () if name in (None, tool["function"]["name"])]
    if not wanted:
        raise BadRequest(f"tool_choice: no tool {name or ''!r}; tools has {known}", param="tool_choice")
    if taken := [key for key in _GRAMMARS if session.sampling_defaults.get(key)]:
        raise BadRequest(f"tool_choice {kind}: the run's sampling has a {taken[0]} already", param="tool_choice")
    try:
        return {"ebnf": call_grammar(wanted, parser, begun_thought=begins_thought(tokenizer))}
    except UsageError as error:
        raise BadRequest(f"tool_choice {kind}: {error}", param="tool_choice") from None


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


async def call_sglang_generate(
    prompt_ids: Sequence[int],
    session: Session,
    body: dict[str, Any],
    *,
    adapter: BaseAdapter,
    session_id: str | None = None,
    constraint: dict[str, Any] | None = None,
    num_before: int = 0,
    images: Sequence[Picture] = (),
) -> TurnRecord:
    """Have the engine continue token ids.

    Args:
        prompt_ids: the whole prompt.
        session: its sampling parameters and its context limit.
        body: the client's request.
        adapter: where the engine is, and what the protocol calls its parameters.
        session_id: keeps the calls of a session on one engine; not sent for "default".
        constraint: more sampling parameters, such as a grammar.
        num_before: tokens at the end of the prompt that belong to this turn: the engine aborted it.
        images: what tokens of the prompt stand for.

    Returns:
        The turn; one without output where the prompt leaves no room in the context.

    Raises:
        HttpError: the engine refused, did not answer in time, or saw another number of prompt tokens than the trainer.
    """
    keys = {"max_token_keys": adapter.max_token_keys, "stop_keys": adapter.stop_keys}
    params = {**sampling_params(session, body, **keys), **(constraint or {})}
    if (pictures := adapter.sessions.pictures) is not None:  # an engine could not go on from a token of images
        params = pictures.media.with_stops(params)
    num_tokens = width(prompt_ids, images)
    if not _fit(params, session, num_tokens, num_before):
        return TurnRecord(prompt_ids, [], "length", images=tuple(images))
    rid, limit_s = new_id(num_hex=32), min(adapter.engine_timeout_s, max(session.seconds_left, 0.0))
    payload = _payload(prompt_ids, params, images) | {"rid": rid}
    if adapter.sessions.keeps_experts:
        payload["return_routed_experts"] = True
    headers = {AFFINITY_HEADER: session_id} if session_id and session_id != DEFAULT_SID else None
    answer = await _ask(adapter, payload, headers, limit_s)
    answer = settled(answer, params, adapter.tokenizer)
    turn = _turn_of(prompt_ids, answer, keeps_experts=adapter.sessions.keeps_experts)
    return _with_images(turn, images, num_tokens)


async def _ask(adapter: BaseAdapter, payload: dict[str, Any], headers: dict[str, str] | None, limit_s: float) -> Any:
    """The engine's answer; where nobody waits for it any more, the engine is told."""
    rid = payload["rid"]
    try:
        async with asyncio.timeout(limit_s):
            return await post(f"{adapter.sglang_url}/generate", payload, headers=headers)
    except TimeoutError:
        await _abort(adapter, rid)
        raise HttpError(f"the engine did not answer within {limit_s:g} s") from None
    except (asyncio.CancelledError, HttpError) as error:
        if getattr(error, "status", None) is None:  # an engine that has answered has ended the request, too
            await _abort(adapter, rid)
        raise


def _payload(prompt_ids: Sequence[int], params: dict[str, Any], images: Sequence[Picture]) -> dict[str, Any]:
    ids: Any = orjson.Fragment(prompt_ids.json()) if isinstance(prompt_ids, SharedIds) else prompt_ids
    shown = {"image_data": [image.uri for image in images]} if images else {}
    return {"input_ids": ids, "sampling_params": params, "return_logprob": True, **shown}


def _with_images(turn: TurnRecord, images: Sequence[Picture], num_tokens: int) -> TurnRecord:
    """A turn with its images; the engine must have seen as many prompt tokens as the trainer will."""
    if not images:
        return turn
    if not saw_all(meta_info := turn.meta_info or {}, num_tokens):
        seen = meta_info.get("prompt_tokens")
        sizes = ", ".join(f"{one.image.width} x {one.image.height} {one.num_tokens}" for one in images)
        raise HttpError(
            f"the engine saw {seen} prompt tokens; with the processor of --hf-checkpoint they are {num_tokens}, "
            f"images {sizes} of them: it left one out or scaled it otherwise"
        )
    return replace(turn, images=tuple(images))


def _fit(params: dict[str, Any], session: Session, num_prompt: int, num_before: int) -> bool:
    """Cut what may be generated to what is left; returns whether anything is."""
    limit = min(params["max_new_tokens"], session.tokens_left) - num_before
    if session.max_context_tokens > 0:
        limit = min(limit, session.max_context_tokens - num_prompt)
    params["max_new_tokens"] = limit
    if params.get("min_new_tokens"):
        params["min_new_tokens"] = min(max(params["min_new_tokens"] - num_before, 0), limit)
    return limit > 0


def _turn_of(prompt_ids: Sequence[int], answer: Any, *, keeps_experts: bool = False) -> TurnRecord:
    meta_info = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta_info, dict):
        raise HttpError(f"/generate answered {str(answer)[:300]!r}, which has no meta_info")
    output_ids, log_probs = tokens_of(meta_info)
    went_on("tokens", len(output_ids))
    finish = (meta_info.get("finish_reason") or {}).get("type", "stop")
    unused = ("output_token_logprobs",) if keeps_experts else ("output_token_logprobs", "routed_experts")
    kept = {name: value for name, value in meta_info.items() if name not in unused}
    return TurnRecord(prompt_ids, output_ids, finish, log_probs, meta_info=kept)


async def _abort(adapter: BaseAdapter, rid: str) -> None:
    """Tell the engine that nobody waits for a request any more."""
    with contextlib.suppress(HttpError):
        await post(f"{adapter.sglang_url}/abort_request", {"rid": rid}, 0, timeout_s=_ABORT_TIMEOUT_S)


def joined(prompt_ids: Sequence[int], parts: list[TurnRecord]) -> TurnRecord:
    """One turn of the calls that it took."""
    finish_reason = parts[-1].finish_reason  # also where the last call had no room for a token
    parts = [part for part in parts if part.output_ids] or parts[-1:]
    ids = [token for part in parts for token in part.output_ids]
    log_probs = [value for part in parts for value in part.output_log_probs]
    last = parts[-1]
    more: dict[str, Any] = {"meta_info": last.meta_info, "parts": tuple(parts), "images": last.images}
    return TurnRecord(prompt_ids, ids, finish_reason, log_probs, **more)
