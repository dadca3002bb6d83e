"""Rewards of servers: requests bounded in number, each with a deadline, tried again with back-off, counted when lost.

`remote_rm` (rm_type remote_rm) takes the answer of --rm-url as the reward; `classify_reward` (rm_type classify) is the
score of the reward model that the run serves under the name "reward" (--reward-model-path), whose conversation its own
tokenizer and chat template render: its words and turns are not those of the policy.

A service says that it has enough by a 429, or a 503 with Retry-After. The slot stays taken for as long as it asks: the
more requests it turns away, the fewer are sent.

Wait graph: a request waits for one of the service's slots (each is held for one try, so for `timeout_s` at most, and
for `MAX_BACKOFF_S` after a busy answer, never during another back-off), then for the service; what comes of it lets
the scoring of its samples go on. A sample of a batch waits for its sender, which is a sample with a slot. A reward
that every try failed for is a `RewardError`, which the rollout treats as --on-sample-error says.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from slime.config.args import Args
from slime.rollout.hooks.process_rewards import turn_spans
from slime.rollout.rm_hub.math_utils import without_stop_tokens
from slime.utils.async_utils import gather_or_cancel
from slime.utils.errors import HttpError
from slime.utils.http.api_keys import headers_for
from slime.utils.misc import SingletonMeta, needed
from slime.utils.processing_utils import encode_text, load_tokenizer, render_chat
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 30.0
MAX_BUSY_S = 600.0  # busy answers count as no tries until then
_HEAD_CHARS = 500


@dataclass(frozen=True)
class Service:
    """Where rewards come from and how patiently they are asked for.

    Attributes:
        name: as errors call it, with the flag that has its address.
        url: full address.
        max_in_flight: requests at a time, from this process.
        timeout_s: one try, from the moment it has a slot.
        max_tries: tries in all.
        proxy: address of an HTTP proxy, None = none.
        batch_size: samples of a request at most. Above 1 it is a list of payloads, answered by a list in their order.
    """

    name: str
    url: str
    max_in_flight: int = 64
    timeout_s: float = 120.0
    max_tries: int = 10
    proxy: str | None = None
    batch_size: int = 1


class RewardError(HttpError):
    """A sample that a reward service did not score.

    Attributes:
        service: name of the service, with its flag.
        sample_index: `Sample.index` of the sample.
        answer: head of the last answer, or the last error where none came.
        status: HTTP status of the last answer, None without one; below 500 the request was refused, and trying again
            cannot help.
    """

    def __init__(
        self, service: str, what: str, *, sample_index: int | None, answer: str, status: int | None = None
    ) -> None:
        super().__init__(f"{service} {what} for sample {sample_index}: {answer}", status=status)
        self.service, self.what, self.sample_index, self.answer = service, what, sample_index, answer

    def __reduce__(self) -> Any:
        return _rebuild, (self.service, self.what, self.sample_index, self.answer, self.status)


def _rebuild(service: str, what: str, sample_index: int | None, answer: str, status: int | None) -> RewardError:
    return RewardError(service, what, sample_index=sample_index, answer=answer, status=status)


class _Outcome(NamedTuple):
    """What came of a try: why it failed or None, the HTTP status or None, the answer's JSON."""

    problem: str | None
    status: int | None = None
    value: Any = None
    is_busy: bool = False


@dataclass(frozen=True, eq=False)
class _Waiting:
    payload: Any
    outcome: asyncio.Future[_Outcome]


class _Line:
    """The slots of a service, and the samples that wait for one: who gets a slot sends the oldest of them."""

    def __init__(self, max_in_flight: int) -> None:
        self.slots = asyncio.Semaphore(max_in_flight)
        self._waiting: deque[_Waiting] = deque()

    async def send(self, service: Service, payload: Any) -> _Outcome:
        """One try of a payload, alone or with others."""
        if service.batch_size == 1:
            async with self.slots:
                return await _send(service, payload)
        mine = _Waiting(payload, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        try:
            async with self.slots:
                await asyncio.sleep(0)  # what comes at the same moment goes with it
                while mine in self._waiting:  # else another has sent it
                    await self._send_oldest(service)
            return await mine.outcome
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)

    async def _send_oldest(self, service: Service) -> None:
        batch = [self._waiting.popleft() for _ in range(min(service.batch_size, len(self._waiting)))]
        results = [_Outcome("the request was given up")] * len(batch)
        try:
            results = await _send_all(service, [waiting.payload for waiting in batch])
        finally:  # a cancelled sender strands no other sample
            for waiting, result in zip(batch, results, strict=True):
                if not waiting.outcome.done():
                    waiting.outcome.set_result(result)


class _Client:
    """Owner of the line of each service, by event loop, and of the count of lost rewards."""

    def __init__(self) -> None:
        self._lines: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], _Line]] = WeakKeyDictionary()
        self.num_failures = 0

    async def send(self, service: Service, payload: Any) -> _Outcome:
        of_loop = self._lines.setdefault(asyncio.get_running_loop(), {})
        line = of_loop.setdefault((service.url, service.max_in_flight), _Line(service.max_in_flight))
        return await line.send(service, payload)


_client = _Client()


def take_reward_failures() -> int:
    """Rewards that services failed to give since the last call, in training and evaluation."""
    count, _client.num_failures = _client.num_failures, 0
    return count


def backoff_s(attempt: int) -> float:
    """Seconds to wait after the failed attempt number `attempt` (from 0), with jitter so that tries do not align."""
    return min(2.0**attempt, MAX_BACKOFF_S) + random.random()


async def ask(
    service: Service, payload: Any, sample: Sample, *, reject: Callable[[Any], str | None] | None = None
) -> Any:
    """POST `payload` and return the answer's JSON.

    Server errors, lost connections, slow answers and answers that are no JSON are tried again.

    Args:
        reject: says why an answer cannot be used (it is asked for again), or None.

    Raises:
        RewardError: the service refused the request (4xx, at once) or every try failed.
    """
    if service.max_tries < 1:
        raise ValueError(f"max_retries must be at least 1, got {service.max_tries}")
    attempt, patient_until = 0, time.monotonic() + MAX_BUSY_S
    while True:
        problem, status, value, is_busy = await _client.send(service, payload)
        if problem is None and reject is not None:
            problem = reject(value)
        if problem is None:
            return value
        if is_busy and time.monotonic() < patient_until:
            continue
        if status is not None and 400 <= status < 500 and not is_busy:
            raise _lost(service, "refused the request", sample, problem, status)
        attempt += 1
        if attempt == service.max_tries:
            raise _lost(service, f"failed {service.max_tries} times", sample, problem, status)
        logger.warning("%s, try %d of %d: %s", service.name, attempt, service.max_tries, problem)
        await asyncio.sleep(backoff_s(attempt - 1))


async def _send_all(service: Service, payloads: list[Any]) -> list[_Outcome]:
    """One request with a list; if it is refused, one for each payload, so that a bad one costs the others nothing."""
    whole = await _send(service, payloads)
    if whole.problem is not None:
        is_refused = whole.status is not None and 400 <= whole.status < 500 and not whole.is_busy
        if is_refused and len(payloads) > 1:
            return [(await _send_all(service, [payload]))[0] for payload in payloads]
        return [whole] * len(payloads)
    if not isinstance(whole.value, list) or len(whole.value) != len(payloads):
        said = f"{len(payloads)} rewards in a list are needed, not {str(whole.value)[:_HEAD_CHARS]}"
        return [_Outcome(said, whole.status)] * len(payloads)
    return [_Outcome(None, whole.status, value) for value in whole.value]


async def _send(service: Service, body: Any) -> _Outcome:
    """POST once. After a busy answer this takes as long as the service asks."""
    import aiohttp  # a fifth of a second that only runs with a reward service pay

    from slime.utils.http_utils import shared_session

    timeout = aiohttp.ClientTimeout(total=service.timeout_s)
    try:
        # A request that waited for a connection would wait inside its own deadline.
        async with shared_session(is_control=True).post(
            service.url,
            json=body,
            headers=headers_for(service.url),
            proxy=service.proxy,
            timeout=timeout,
        ) as answer:
            status, text = answer.status, await answer.text(errors="replace")
            pause = answer.headers.get("Retry-After")
    except TimeoutError:
        return _Outcome(f"no answer within {service.timeout_s:g} s")
    except (aiohttp.ClientError, OSError) as error:
        return _Outcome(f"{type(error).__name__}: {error}")
    if is_busy := status == 429 or (status == 503 and pause is not None):
        await asyncio.sleep(min(float(pause), MAX_BACKOFF_S) if pause and pause.isdecimal() else backoff_s(0))
    if status >= 400:
        return _Outcome(f"HTTP {status}: {text[:_HEAD_CHARS]}", status, is_busy=is_busy)
    try:
        return _Outcome(None, status, json.loads(text))
    except ValueError:
        return _Outcome(f"HTTP {status} with a body that is no JSON: {text[:_HEAD_CHARS]!r}", status)


def _lost(service: Service, what: str, sample: Sample, answer: str, status: int | None) -> RewardError:
    _client.num_failures += 1
    return RewardError(
        f"{service.name} ({service.url})", what, sample_index=sample.index, answer=answer, status=status
    )


def unusable(service: Service, sample: Sample, answer: object) -> RewardError:
    """The error for an answer that is JSON, but not what the service is to answer; it counts as a lost reward."""
    return _lost(service, "gave an unexpected answer", sample, str(answer)[:_HEAD_CHARS], None)


async def remote_rm(args: Args, sample: Sample, max_retries: int = 10) -> Any:
    """POST prompt, response and label to `args.rm_url` and return the answer's JSON.

    With --rm-batch-size above 1 a list of what waits, answered by a list. At most --rm-concurrency requests at a time,
    120 s for a try. Server and connection errors are tried again, `max_retries` times in all.

    Raises:
        RewardError: the service refused the request (4xx, at once, with its text) or every try failed.
    """
    service = Service(
        "the reward service of --rm-url",
        needed(args.rm_url),
        max_in_flight=args.rm_concurrency,
        max_tries=max_retries,
        proxy=args.http_proxy,
        batch_size=args.rm_batch_size,
    )
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    return await ask(service, payload, sample)


MODEL_NAME = "reward"
MAX_IN_FLIGHT = 512  # the engine batches
TIMEOUT_S = 600.0  # one forward pass, behind those of the others


class RewardTokenizer(metaclass=SingletonMeta):
    """The reward model's tokenizer, read once per process."""

    def __init__(self, args: Args) -> None:
        self.tokenizer = load_tokenizer(needed(args.reward_model_path), trust_remote_code=args.trust_remote_code)


def conversation(sample: Sample, response: str) -> list[dict[str, Any]]:
    """The sample as messages: the prompt's (metadata["messages"], else the prompt itself), then the response.

    A prompt that is text counts as one user turn.
    """
    prompt = sample.metadata.get("messages") or sample.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [*messages, {"role": "assistant", "content": response}]


@functools.cache
def _policy_tokenizer(path: str, trust_remote_code: bool) -> Any:
    return load_tokenizer(path, trust_remote_code=trust_remote_code)


async def score_turns(args: Args, sample: Sample) -> list[float | None]:
    """The reward model's score of the sample up to the end of each turn: a --process-reward-path.

    Raises:
        RewardError, ValueError: as `classify_reward`.
    """
    tokenizer = _policy_tokenizer(args.hf_checkpoint, args.trust_remote_code)
    start = len(sample.tokens) - sample.response_length
    texts = [tokenizer.decode(sample.tokens[start : start + end]) for _, end in turn_spans(sample)]
    return await gather_or_cancel(classify_reward(args, without_stop_tokens(text), sample) for text in texts)


async def classify_reward(args: Args, response: str, sample: Sample) -> float:
    """The reward model's score of the sample with `response`, which has no stop token: the template closes the turn.

    Raises:
        RewardError: the engine failed, refused the sample (longer than its context, say), or answered more than one
            score.
        ValueError: no reward model runs.
    """
    from slime.rollout.sampling.engine_request import required_model_url  # here: it imports aiohttp

    url = required_model_url(args, MODEL_NAME, "/classify", remedy="--reward-model-path starts one")
    service = Service(
        "the reward model of --reward-model-path",
        url,
        max_in_flight=MAX_IN_FLIGHT,
        timeout_s=TIMEOUT_S,
    )
    tokenizer = RewardTokenizer(args).tokenizer
    text = render_chat(tokenizer, conversation(sample, response), add_generation_prompt=False)
    payload = {"input_ids": encode_text(tokenizer, text)}
    answer = await ask(service, payload, sample)
    entry = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
    scores = entry.get("embedding") if isinstance(entry, dict) else None
    if not isinstance(scores, list) or len(scores) != 1:
        raise unusable(service, sample, f"{len(scores)} scores, not 1" if isinstance(scores, list) else answer)
    return float(scores[0])
