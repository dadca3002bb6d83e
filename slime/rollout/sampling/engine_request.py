"""Requests to engines: where each model is, the body of a /generate call, and what comes of its answer.

Each model (policy, reward model, teacher, ...) has a router of its own; `args.sglang_model_routers` (name -> (ip,
port)) is what the rollout manager published.
"""

from __future__ import annotations

from typing import Any

from slime.config.args import Args
from slime.processes.progress import went_on
from slime.rollout.sampling.images import check_count, engine_ids, image_data, with_image_stop
from slime.utils.types import Sample
from slime.weights.adapters import POLICY, live_name


def router_url(args: Args) -> str:
    """Address of the default router."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}"


def get_model_url(args: Args, model_name: str, endpoint: str = "/generate") -> str:
    """Address of a model's router by its name; the default router for a name that has none."""
    routers = args.sglang_model_routers or {}
    ip, port = routers.get(model_name) or (args.sglang_router_ip, args.sglang_router_port)
    return f"http://{ip}:{port}{endpoint}"


def required_model_url(args: Args, model_name: str, endpoint: str, *, remedy: str) -> str:
    """As `get_model_url`, but the model must run: the policy would answer in its place, and nobody would notice.

    Raises:
        ValueError: there is no model of this name; `remedy` says what starts one.
    """
    if model_name not in (args.sglang_model_routers or {}):
        running = ", ".join(args.sglang_model_routers or {}) or "none with a name"
        raise ValueError(f"no model {model_name!r} runs (running: {running}); {remedy}")
    return get_model_url(args, model_name, endpoint)


AFFINITY_POLICY = "consistent_hashing"
AFFINITY_HEADER = "X-SMG-Routing-Key"
_HEAD_CHARS = 500


def engine_payload(
    sample: Sample, sampling_params: dict[str, Any], *, with_routed_experts: bool = False
) -> dict[str, Any]:
    """The body of a /generate call: token ids, and the images that stand for some of them."""
    payload: dict[str, Any] = {"input_ids": engine_ids(sample), "return_logprob": True}
    payload["sampling_params"] = with_image_stop(sample, sampling_params)
    if with_routed_experts:
        payload["return_routed_experts"] = True
    if policy := sample.metadata.get(POLICY):
        payload["lora_path"] = live_name(policy)
    return payload | ({"image_data": image_data(sample)} if sample.image_spans else {})


def engine_headers(args: Args, sample: Sample) -> dict[str, str] | None:
    """The header that keeps the calls of one session on one engine, where the router's policy reads it."""
    if args.router_policy != AFFINITY_POLICY or not sample.session_id:
        return None
    return {AFFINITY_HEADER: sample.session_id}


def call_budget(
    sample: Sample, sampling_params: dict[str, Any], *, max_context_len: int | None
) -> dict[str, Any] | None:
    """Sampling parameters with what the response already has taken off its limits; None when no token is left.

    Raises:
        ValueError: no response length is set.
    """
    if sampling_params["max_new_tokens"] is None:
        raise ValueError("--rollout-max-response-len is not set; the default generate function needs it")
    budget = sampling_params["max_new_tokens"] - sample.response_length
    if max_context_len is not None:
        budget = min(budget, max_context_len - len(sample.tokens))
    if budget <= 0:
        return None
    params = {**sampling_params, "max_new_tokens": budget}
    if params.get("min_new_tokens"):
        params["min_new_tokens"] = min(max(params["min_new_tokens"] - sample.response_length, 0), budget)
    return params


def append_engine_output(args: Args, sample: Sample, output: Any, *, trainable: bool = True) -> None:
    """Append what /generate answered: tokens, log-probs, text, and how it ended.

    Args:
        trainable: False masks the tokens (their log-probs are not the policy's).

    Raises:
        RuntimeError: the answer is none of /generate, does not hold a token and a log-prob for each new token, or is
            to another number of prompt tokens than the sample's, where it has images.
    """
    meta_info = _meta_info_of(output)
    check_count(sample, meta_info)
    token_ids, log_probs = tokens_of(meta_info)
    went_on("tokens", len(token_ids))
    sample.append_response_tokens(
        args,
        tokens=token_ids,
        log_probs=log_probs if trainable else None,
        trainable=trainable,
        meta_info=meta_info,
        text=output.get("text"),
    )


def _meta_info_of(output: Any) -> dict[str, Any]:
    meta_info = output.get("meta_info") if isinstance(output, dict) else None
    if not isinstance(meta_info, dict):
        raise RuntimeError(f"/generate answered {str(output)[:_HEAD_CHARS]!r}, which has no meta_info")
    reason = meta_info.get("finish_reason")
    if not isinstance(reason, dict) or "type" not in reason:
        raise RuntimeError(f"/generate answered the finish_reason {reason!r}, which does not say how generating ended")
    return meta_info


def tokens_of(meta_info: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Read (ids of the new tokens, their log-probs) from the `meta_info` of a /generate answer.

    Raises:
        RuntimeError: it does not hold a token and a log-prob for each new token.
    """
    pairs, count = meta_info.get("output_token_logprobs"), meta_info.get("completion_tokens")
    if pairs is None and count:
        raise RuntimeError("/generate returned no output_token_logprobs although return_logprob was asked for")
    try:
        token_ids, log_probs = [pair[1] for pair in pairs or []], [pair[0] for pair in pairs or []]
    except (TypeError, LookupError):
        head = str(pairs)[:_HEAD_CHARS]
        raise RuntimeError(f"/generate answered output_token_logprobs that are no [log-prob, id]: {head}") from None
    if count is not None and count != len(token_ids):
        raise RuntimeError(f"/generate answered {count} tokens, but log-probs of {len(token_ids)}")
    if None in log_probs:  # JSON has no NaN
        raise RuntimeError(
            f"/generate answered null as the log-prob of new token {log_probs.index(None)}: a NaN, as broken weights "
            "give it"
        )
    return token_ids, log_probs
