"""Generating one sample with a streamed answer, so that nothing is lost when the answer does not end.

    --custom-generate-function-path slime.rollout.sglang_streaming_rollout.generate_streaming

Each event of SGLang's stream holds everything generated so far, so an event per token would cost the square of the
response; the engine is asked for at most 64 events instead (`stream_interval` in the sampling parameters, unless the
caller has set it). When the connection breaks, the engine dies or this task is cancelled, the sample keeps the tokens,
log-probs and weight version of the last event; after a broken connection generating goes on from there, on whichever
engine the router picks.

Wait graph of `generate_streaming`:
    consumes     the sample's tokens, which an earlier rollout may have begun
    waits for    the next event of the stream, no longer than the HTTP client's limit of one request; after a break
                 that brought no token also a pause that doubles
    unblocks     its caller, with the sample completed, truncated or aborted
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from slime.config.args import Args
from slime.rollout.sampling.engine_request import (
    append_engine_output,
    call_budget,
    engine_headers,
    engine_payload,
    router_url,
    set_response_text,
    settled,
)
from slime.rollout.sampling.generation import GenerateState, tokenize_prompt
from slime.utils.errors import HttpError
from slime.utils.http.network import OUTAGES
from slime.utils.http_utils import is_new_incident, stream_events
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
_MOST_BREAKS_IN_A_ROW = 8  # without one new token; the pauses between add up to about half a minute
_MOST_EVENTS = 64
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0


async def generate_streaming(
    args: Args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """As slime.rollout.sglang_rollout.generate, with a streamed answer; --rollout-fire-temperature is not supported.

    Raises:
        HttpError: the engine refused the request, or the connection broke again and again.
        ValueError: the prompt is a message list, or no response length is set.
    """
    state = GenerateState(args)
    if not sample.tokens:
        await tokenize_prompt(state, sample)
    limit = args.eval_max_context_len if evaluation else args.rollout_max_context_len
    num_breaks, is_one_call = 0, sample.response_length == 0
    while True:
        params = call_budget(sample, sampling_params, max_context_len=limit)
        if params is None:
            sample.status = Sample.Status.TRUNCATED
            return sample
        before = sample.response_length
        try:
            await _stream(args, sample, params)
            break
        except HttpError as error:
            is_one_call = False
            num_breaks = 1 if sample.response_length > before else num_breaks + 1
            if OUTAGES.may_end(router_url(args)):  # the next call waits for its end
                num_breaks = 1
            if error.is_refused or num_breaks > _MOST_BREAKS_IN_A_ROW:
                raise
            if state.aborted and not evaluation:
                sample.status = Sample.Status.ABORTED
                return sample
            kept = sample.response_length - before
            if is_new_incident(router_url(args)):
                logger.warning("a stream broke off, its %d new tokens are kept and it goes on: %s", kept, error)
            await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** (num_breaks - 1), _LONGEST_PAUSE_S))
    if not is_one_call:
        set_response_text(state.tokenizer, sample, sampling_params)
    return sample


async def _stream(args: Args, sample: Sample, params: dict[str, Any]) -> None:
    """One streamed call; whatever ends it, the sample gets what the last event held.

    Raises:
        HttpError: refused, or broken off before the engine said how the response ended.
    """
    url = f"{router_url(args)}/generate"
    last: dict[str, Any] | None = None
    versions: list[str] = []
    params = {"stream_interval": -(-params["max_new_tokens"] // _MOST_EVENTS), **params}
    state = GenerateState(args)
    payload = {**engine_payload(sample, params, state), "stream": True}
    try:
        async for event in stream_events(url, payload, headers=engine_headers(args, sample)):
            last = _checked(event)
            versions.append(str(last["meta_info"].get("weight_version", "")))
        if last is None or not last["meta_info"].get("finish_reason"):
            raise HttpError(f"POST {url} broke off: the stream ended before the response did")
    finally:
        if last is not None:
            _keep(args, sample, settled(last, payload["sampling_params"], state.tokenizer), versions)


def _checked(event: Any) -> dict[str, Any]:
    if isinstance(event, dict) and "meta_info" in event:
        return event
    error = event.get("error") if isinstance(event, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    raise HttpError(f"the engine's stream said {str(event)[:500]!r}", status=code if isinstance(code, int) else None)


def _keep(args: Args, sample: Sample, event: dict[str, Any], versions: list[str]) -> None:
    """Append what an event holds; each version of weights that the stream saw is noted once.

    An event without an end is noted as an abort: the sample can be gone on with.
    """
    meta_info = event["meta_info"]
    if not meta_info.get("finish_reason"):
        meta_info = {**meta_info, "finish_reason": {"type": "abort"}}
    seen = [version for version in dict.fromkeys(versions) if version]
    sample.weight_versions += [version for version in seen if version != str(meta_info.get("weight_version"))]
    append_engine_output(args, sample, {**event, "meta_info": meta_info})
