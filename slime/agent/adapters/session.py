"""A session of an agent: its sampling parameters, its history, and its calls of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime.agent.adapters.wire import BadRequest
from slime.agent.history import History
from slime.agent.trajectory import TurnRecord
from slime.processes.progress_counts import went_on
from slime.rollout.sampling.engine_request import AFFINITY_HEADER, tokens_of
from slime.utils.errors import HttpError
from slime.utils.http_utils import post

if TYPE_CHECKING:
    from slime.agent.adapters.common import BaseAdapter

DEFAULT_SID = "default"
_ABORT_TIMEOUT_S = 5.0

_BASE: dict[str, Any] = {
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
    "max_new_tokens": 4096,
}
_CLIENT_KEYS = ("temperature", "top_p", "top_k")
# They would change what is sampled, and the trainer would not know.
_UNUSED_KEYS = ("presence_penalty", "frequency_penalty", "logit_bias", "seed", "response_format", "tool_choice")
_NEUTRAL: tuple[Any, ...] = (None, 0, {}, "auto", "none", {"type": "auto"}, {"type": "none"}, {"type": "text"})


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
    """

    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    max_context_tokens: int = 0
    is_open: bool = False
    num_turns: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    history: History = field(default_factory=History)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    used_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Reply:
    """An answer: as the tree keeps it, how it ended, and as the client gets it."""

    manager_message: dict[str, Any]
    finish_reason: str
    wire: Any


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
    session.ignored.update(key for key in _UNUSED_KEYS if body.get(key) not in _NEUTRAL)
    return params


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


async def call_sglang_generate(
    prompt_ids: list[int],
    session: Session,
    body: dict[str, Any],
    *,
    adapter: BaseAdapter,
    session_id: str | None = None,
) -> TurnRecord:
    """Have the engine continue token ids.

    Args:
        prompt_ids: the whole prompt.
        session: its sampling parameters and its context limit.
        body: the client's request.
        adapter: where the engine is, and what the protocol calls its parameters.
        session_id: keeps the calls of a session on one engine; not sent for "default".

    Returns:
        The turn; one without output where the prompt leaves no room in the context.

    Raises:
        HttpError: the engine refused, or did not answer in time.
    """
    keys = {"max_token_keys": adapter.max_token_keys, "stop_keys": adapter.stop_keys}
    params = sampling_params(session, body, **keys)
    if session.max_context_tokens > 0:
        room = session.max_context_tokens - len(prompt_ids)
        if room <= 0:
            return TurnRecord(prompt_ids, [], "length")
        params["max_new_tokens"] = min(params["max_new_tokens"], room)
    rid = uuid.uuid4().hex
    payload = {"rid": rid, "input_ids": prompt_ids, "sampling_params": params, "return_logprob": True}
    headers = {AFFINITY_HEADER: session_id} if session_id and session_id != DEFAULT_SID else None
    try:
        async with asyncio.timeout(adapter.engine_timeout_s):
            answer = await post(f"{adapter.sglang_url}/generate", payload, headers=headers)
    except TimeoutError:
        await _abort(adapter, rid)
        raise HttpError(f"the engine did not answer within {adapter.engine_timeout_s:g} s") from None
    except (asyncio.CancelledError, HttpError) as error:
        if getattr(error, "status", None) is None:  # an engine that has answered has ended the request, too
            await _abort(adapter, rid)
        raise
    return _turn_of(prompt_ids, answer)


def _turn_of(prompt_ids: list[int], answer: Any) -> TurnRecord:
    meta_info = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta_info, dict):
        raise HttpError(f"/generate answered {str(answer)[:300]!r}, which has no meta_info")
    output_ids, log_probs = tokens_of(meta_info)
    went_on("tokens", len(output_ids))
    finish = (meta_info.get("finish_reason") or {}).get("type", "stop")
    # Samples of several turns have no routing replay yet; a part of the routing would be refused when they are made.
    kept = {name: value for name, value in meta_info.items() if name != "routed_experts"}
    return TurnRecord(prompt_ids, output_ids, finish, log_probs, meta_info=kept)


async def _abort(adapter: BaseAdapter, rid: str) -> None:
    """Tell the engine that nobody waits for a request any more."""
    with contextlib.suppress(HttpError):
        await post(f"{adapter.sglang_url}/abort_request", {"rid": rid}, 0, timeout_s=_ABORT_TIMEOUT_S)
