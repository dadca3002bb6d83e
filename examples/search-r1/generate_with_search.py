"""Search-R1: a model that searches while it answers, in one assistant turn.

    --custom-generate-function-path generate_with_search.generate --custom-rm-path generate_with_search.reward_func

The model writes until `</search>` or `</answer>`; what the search found is appended as `<information>`, untrained, and
the model goes on behind it. Trained are the very tokens that the engine made. An aborted sample goes on where it
stopped. `search_r1: {...}` in the file of --custom-config-path overrides entries of `SEARCH_R1_CONFIGS`.

Wait graph: a turn waits for the router's /generate, then for one of `search_concurrency` slots, then for the search
service, `search_timeout_s` at most.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from google_search_server import google_search
from local_search_server import SearchError, local_search
from qa_em_format import compute_score_em

from slime.rollout.sampling.generation import GenerateState
from slime.rollout.sampling.generation import generate as generate_once
from slime.utils.errors import UsageError
from slime.utils.misc import merged_settings
from slime.utils.processing_utils import encode_text
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
SEARCH_R1_CONFIGS: dict[str, Any] = {
    "max_turns": 2,  # engine calls of a sample: one search and an answer
    "topk": 3,
    "search_concurrency": 256,
    "search_timeout_s": 60.0,
    "max_information_chars": 8000,  # of one search
    "search_backend": "local",  # or "google"
    "local": {"search_url": "http://127.0.0.1:8000/retrieve", "proxy": None},
    "google": {"api_key": "", "snippet_only": True, "proxy": None},
    # Of compute_score_em: "structure_format_score", "final_format_score", "retrieval_score".
    "reward": {},
}
STOPS = ["</search>", "</answer>"]
HINT = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
Status = Sample.Status
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def config_of(args: Any) -> dict[str, Any]:
    """`SEARCH_R1_CONFIGS` with what the run's `search_r1` says.

    Raises:
        UsageError: `search_r1` has an entry that there is not, or a wrong value.
    """
    return merged_settings("search_r1", vars(args).get("search_r1"), SEARCH_R1_CONFIGS)


def check_args(args: Any) -> Iterator[str]:
    """A sentence for each setting that cannot be; slime asks before a run starts."""
    try:
        config = config_of(args)
    except UsageError as error:
        yield from error.messages
        return
    backend, google = config["search_backend"], config["google"]
    if backend not in ("local", "google"):
        yield f"search_r1 in --custom-config-path: search_backend {backend!r} is neither local nor google."
    if backend == "google" and not (google["api_key"] and google["snippet_only"]):
        yield "search_r1 in --custom-config-path: google needs its api_key, and snippet_only: true."


async def search(query: str, *, config: Mapping[str, Any] = SEARCH_R1_CONFIGS) -> str:
    """What the search service found, as the model reads it: `Doc 1(Title: T) text` lines.

    Raises:
        SearchError: the service failed.
    """
    backend, limits = config["search_backend"], {"top_k": config["topk"], "timeout": config["search_timeout_s"]}
    slots = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(config["search_concurrency"]))
    async with slots:
        if backend == "local":
            hits = await local_search(query=query, **limits, **config["local"])
        elif backend == "google":
            hits = await google_search(query=query, **limits, **config["google"])
        else:
            raise ValueError(f"search_backend {backend!r}: local or google")
    lines = []
    for number, hit in enumerate(hits, 1):
        title, _, text = hit["document"]["contents"].partition("\n")
        title = title.strip('"')
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    return "".join(lines)[: config["max_information_chars"]]


def postprocess_predictions(prediction: str) -> tuple[str | None, str]:
    """(action, content) of a turn: its first search or answer; (None, "") without one."""
    match = _ACTION.search(prediction)
    return (match[1], match[2].strip()) if match else (None, "")


async def execute_predictions(prediction: str, *, config: Mapping[str, Any] = SEARCH_R1_CONFIGS) -> tuple[str, bool]:
    """Do what a turn asks for.

    Returns:
        (text that follows the turn, whether the conversation is over).

    Raises:
        SearchError: the search service failed.
    """
    action, content = postprocess_predictions(prediction)
    if action == "answer":
        return "", True
    if action == "search":
        found = await search(content, config=config)
        return f"\n\n<information>{found}</information>\n\n", False
    return HINT, False


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Answer one question with as many searches as the model wants and `max_turns` allows.

    Args:
        args: `search_r1`, and what the default generate function reads.
        sample: its prompt is text (--apply-chat-template). An aborted one is continued.
        sampling_params: SGLang's. `max_new_tokens` is of a turn; --rollout-max-context-len bounds the whole.
        evaluation: whose limit of the context holds; an evaluation is not aborted.

    Returns:
        The sample. Its `end_reason` is "done" with an answer; "max_turns" and "length" are TRUNCATED; "env_error"
        (the search service failed) has an untrusted reward.
    """
    state, config = GenerateState(args), config_of(args)
    if not sample.response_length:
        sample.metadata = sample.metadata | {"round_number": 0, "tool_calls": 0, "tool_errors": 0, "turn_start": 0}
    while True:
        text = await _write_turn(args, sample, sampling_params, evaluation)
        if sample.status is not Status.COMPLETED:
            if sample.status is Status.TRUNCATED:
                sample.end_reason = "length"
            return sample
        if sample.metadata["round_number"] >= config["max_turns"] and postprocess_predictions(text)[0] != "answer":
            sample.status, sample.end_reason = Status.TRUNCATED, "max_turns"
            return sample
        if await _act(args, sample, text, config):
            return sample
        if state.aborted and not evaluation:
            sample.status = Status.ABORTED
            return sample


async def _write_turn(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> str:
    """Let the model write, or finish, a turn; returns its text."""
    metadata, state = sample.metadata, GenerateState(args)
    start = metadata["turn_start"]  # response tokens before the turn
    stops = sampling_params.get("stop") or []
    params = {**sampling_params, "stop": [*([stops] if isinstance(stops, str) else stops), *STOPS]}
    if params["max_new_tokens"] is not None:  # generate_once takes the whole response off it
        params["max_new_tokens"] += start
    sample.status = Status.PENDING
    await generate_once(args, sample, params, evaluation)
    if sample.status is Status.COMPLETED:
        metadata["round_number"] += 1
    written = sample.tokens[len(sample.tokens) - sample.response_length + start :]
    return str(state.tokenizer.decode(written, skip_special_tokens=False))


async def _act(args: Any, sample: Sample, text: str, config: Mapping[str, Any]) -> bool:
    """Answer a finished turn; returns whether the conversation is over."""
    begin, metadata = time.monotonic(), sample.metadata
    try:
        observation, is_done = await execute_predictions(text, config=config)
    except SearchError as error:
        logger.warning("sample %s: the search failed: %s", sample.index, error)
        sample.end_reason, sample.reward_is_trusted = "env_error", False
        return True
    finally:
        sample.non_generation_time += time.monotonic() - begin
    if is_done:
        sample.end_reason = "done"
        return True
    metadata["tool_calls"] += observation is not HINT
    metadata["tool_errors"] += observation is HINT
    ids = encode_text(GenerateState(args).tokenizer, observation)
    sample.append_response_tokens(args, tokens=ids, trainable=False, text=observation)
    metadata["turn_start"] = sample.response_length
    return False


generate.check_args = check_args  # type: ignore[attr-defined]


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Exact match of the last answer with a target; the label is `{"ground_truth": {"target": [answers]}}`."""
    if not isinstance(sample.label, dict) or "target" not in sample.label.get("ground_truth", {}):
        raise ValueError(f'the label must be {{"ground_truth": {{"target": [...]}}}}, not {str(sample.label)[:80]!r}')
    return compute_score_em(
        f"{sample.prompt}{sample.response}", sample.label["ground_truth"], **config_of(args)["reward"]
    )
