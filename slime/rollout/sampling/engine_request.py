"""Requests to engines: where each model is, the body of a /generate call, and what comes of its answer.

Each model (policy, reward model, teacher, ...) has a router of its own; `args.sglang_model_routers` (name -> (ip,
port)) is what the rollout manager published.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from slime.config.args import Args
from slime.processes.progress import went_on
from slime.rollout.sampling.images import collapsed, engine_ids, image_data
from slime.utils.types import Sample
from slime.weights.adapters import POLICY, live_name

_ENDS = ("<|eom_id|>", "<|content_model_end_sampling|>")  # SGLang ends at these, too, whatever the files say


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


def engine_payload(sample: Sample, sampling_params: dict[str, Any], state: Any) -> dict[str, Any]:
    """The body of a /generate call: token ids, and the images that stand for some of them.

    Args:
        sample: its tokens so far.
        sampling_params: of this call.
        state: of the process: its `args`, and its `media`, which is read where the sample has images.
    """
    media = state.media if sample.image_spans else None
    payload: dict[str, Any] = {"input_ids": engine_ids(sample, media), "return_logprob": True}
    payload["sampling_params"] = media.with_stops(sampling_params) if media else sampling_params
    if state.args.use_rollout_routing_replay:
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


@functools.lru_cache(maxsize=8)
def end_ids(tokenizer: Any) -> frozenset[int]:
    """The ids at which an engine of the tokenizer's checkpoint ends a response, unless it is to ignore them.

    They are those of config.json, generation_config.json and the tokenizer, as `_check_token_based_finish` of SGLang
    has them: GLM-4.x ends its turns with "<|user|>" and "<|observation|>", of which a tokenizer knows nothing.

    Args:
        tokenizer: loaded from a local HF directory; of another, its own ids alone are found.
    """
    added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    found = [getattr(tokenizer, "eos_token_id", None), *(added.get(text) for text in _ENDS)]
    root = str(getattr(tokenizer, "name_or_path", None) or "")
    for name in ("config.json", "generation_config.json") if root else ():
        try:
            config = json.loads((Path(root) / name).read_text())
        except (OSError, ValueError):  # what an engine cannot do without, it asks for itself
            continue
        ends = config.get("eos_token_id")
        ends = (config.get("text_config") or {}).get("eos_token_id") if ends is None else ends
        found += ends if isinstance(ends, list) else [ends]
    return frozenset(token for token in found if isinstance(token, int))


def settled(output: Any, sampling_params: dict[str, Any], tokenizer: Any) -> Any:
    """An answer of /generate, which ended with "stop" where an abort came with the token that ends the response.

    SGLang looks for an abort before it looks at the last token. A resumed sample would go on after its end.

    Args:
        output: the answer.
        sampling_params: of the call.
        tokenizer: of the checkpoint; `end_ids` are what ends a response, too.
    """
    meta_info: Any = output.get("meta_info") if isinstance(output, dict) else None
    reason = meta_info.get("finish_reason") if isinstance(meta_info, dict) else None
    if not isinstance(reason, dict) or reason.get("type") != "abort" or not (tokens := tokens_of(meta_info)[0]):
        return output
    ends = set[int]()
    if not sampling_params.get("ignore_eos"):
        ends = {*(sampling_params.get("stop_token_ids") or ()), *end_ids(tokenizer)}
    if tokens[-1] not in ends and not _stopped(tokens, sampling_params.get("stop"), tokenizer):
        return output
    return {**output, "meta_info": {**meta_info, "finish_reason": {"type": "stop", "matched": tokens[-1]}}}


def _stopped(tokens: list[int], stop: str | list[str] | None, tokenizer: Any) -> bool:
    """Whether the last tokens hold a stop string, which may end inside the last one: as SGLang looks for it."""
    stops = [text for text in ([stop] if isinstance(stop, str) else stop or ()) if text]
    if not stops:
        return False
    longest = max(len(tokenizer.encode(text, add_special_tokens=False)) for text in stops)
    tail = tokenizer.decode(tokens[-longest - 1 :])
    return any(text in tail for text in stops)


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


def set_response_text(tokenizer: Any, sample: Sample, sampling_params: dict[str, Any]) -> None:
    """Read the text of a response of several calls from its tokens: a character may be split between two calls."""
    skip = bool(sampling_params.get("skip_special_tokens"))
    ids = collapsed(sample, len(sample.tokens) - sample.response_length)
    sample.response = tokenizer.decode(ids, skip_special_tokens=skip)


def saw_all(meta_info: dict[str, Any], num_tokens: int) -> bool:
    """Whether an engine saw so many prompt tokens; one that aborted a request that waited does not say.

    Such a request may have new tokens: it was retracted when the cache was full. The next call of a resumed sample
    proves the number anyway.
    """
    seen, reason = meta_info.get("prompt_tokens"), meta_info.get("finish_reason") or {}
    return seen == num_tokens or (
        not seen and reason.get("type") == "abort" and (seen is None or not meta_info.get("completion_tokens"))
    )


def check_count(sample: Sample, meta_info: dict[str, Any]) -> None:
    """The engine saw as many prompt tokens as the trainer will.

    Raises:
        RuntimeError: it did not; the images are named by their sizes.
    """
    seen = meta_info.get("prompt_tokens")
    if not sample.image_spans or saw_all(meta_info, len(sample.tokens)):
        return
    images = (sample.multimodal_inputs or {}).get("images") or []
    sizes = [
        f"image {number} ({picture.width} x {picture.height}) {length}"
        for number, (picture, (_, length)) in enumerate(zip(images, sample.image_spans, strict=True), start=1)
    ]
    raise RuntimeError(
        f"the engine saw {seen} prompt tokens of sample {sample.index} and its images are {len(sample.tokens)} with "
        f"the processor of --hf-checkpoint, {', '.join(sizes)} of them; it left an image out or scaled it otherwise, "
        "so its tokens cannot be trained on. Does the engine serve the same preprocessor_config.json?"
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
