"""What the teacher server is asked and what it answers, as JSON: the shapes of SGLang's /generate that scoring uses.

Bodies are checked here as far as they can be without the model. Then requests wait for it in a queue, on which a loop
of all ranks works.

The queue is bounded; jobs are taken first come, first served, as many at a time as fit together. HTTP handlers put
them in, rank 0's loop takes them out and tells the other ranks; a job whose client went away is dropped. Rank 0 speaks
at least every `HEARTBEAT_S` seconds, so that a rank that waits for it can tell an idle server from a dead one (the
collective's own time limit).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, model_validator

from slime.utils.distributed_utils import get_gloo_group
from slime.utils.errors import UsageError, refuse, sentences

if TYPE_CHECKING:
    from slime.backends.megatron_utils.server.scoring import Scorer

logger = logging.getLogger(__name__)

TokenId = Annotated[int, Field(ge=0, strict=True)]
Alternatives = list[list[tuple[float, int]]]
"""Per scored token: (log-prob, token id) of some tokens that could have been in its place."""


class SamplingParams(BaseModel):
    """What of SGLang's sampling parameters means something where nothing is generated; others are ignored."""

    max_new_tokens: Annotated[int, Field(ge=0, le=0, description="nothing is generated")] = 0
    temperature: Annotated[float, Field(ge=1, le=1, description="log-probs are those of temperature 1")] = 1.0


class GenerateBody(BaseModel):
    """POST /generate: score one sequence. Several are several requests: those that wait together are batched."""

    model_config = ConfigDict(extra="forbid")

    input_ids: Annotated[list[TokenId], Field(min_length=2)]
    response_length: Annotated[int, Field(ge=1)] | None = None
    """Score the last so many tokens."""
    logprob_start_len: Annotated[int, Field(ge=0)] | None = None
    """Score the tokens behind this position, as SGLang does; default: all but the first."""
    top_logprobs_num: Annotated[int, Field(ge=0)] = 0
    """Also the most likely tokens at each place."""
    token_ids_logprob: list[TokenId] | None = None
    """Also these tokens at each place."""
    label_token_ids: list[list[TokenId]] | None = None
    """As `token_ids_logprob`, with a list of its own for each scored token."""
    sample_n: Annotated[int, Field(ge=0)] = 0
    """Also tokens drawn from the teacher's distribution at each place, with replacement."""
    sample_seed: int = 0
    sampling_params: SamplingParams = SamplingParams()
    return_logprob: bool = True
    stream: Annotated[bool, Field(description="an answer comes in one piece")] = False
    rid: str | None = None

    @model_validator(mode="after")
    def _agree(self) -> GenerateBody:
        given = {name for name in ("response_length", "logprob_start_len") if getattr(self, name) is not None}
        length, labels = len(self.input_ids), self.label_token_ids
        problems = sentences(
            (len(given) == 2, "response_length and logprob_start_len say the same; give one"),
            (
                self.token_ids_logprob is not None and labels is not None,
                "token_ids_logprob and label_token_ids exclude each other",
            ),
            (self.stream, "stream is not supported: an answer comes in one piece"),
            (
                not 0 <= self.start < length - 1,
                f"{' and '.join(given)}: of {length} input_ids, 1 to {length - 1} can be scored",
            ),
            (
                labels is not None and len(labels) != self.num_scored,
                f"label_token_ids has {len(labels or ())} lists for {self.num_scored} scored tokens",
            ),
        )
        if problem := next(problems, None):
            raise ValueError(problem)
        return self

    @property
    def start(self) -> int:
        """Position of the last token that is not scored."""
        if self.response_length is not None:
            return len(self.input_ids) - 1 - self.response_length
        return self.logprob_start_len or 0

    @property
    def num_scored(self) -> int:
        """Tokens that get a log-prob."""
        return len(self.input_ids) - 1 - self.start

    @property
    def labels(self) -> list[list[int]] | None:
        """Per scored token, those that get one in its place; None: none were asked for."""
        if self.token_ids_logprob is not None:
            return [self.token_ids_logprob] * self.num_scored
        return self.label_token_ids


class UpdateBody(BaseModel):
    """POST /update_weights_from_disk."""

    model_config = ConfigDict(extra="forbid")

    model_path: str
    """HF directory or Megatron checkpoint root, of a model of the same shape."""
    ckpt_step: Annotated[int, Field(ge=0)] | None = None
    weight_version: str | None = None
    """Name of the new weights in answers; default: the old number plus one."""


@dataclass
class Score:
    """What the model says about one sequence, per scored token."""

    log_probs: list[float]
    top: Alternatives = field(default_factory=list)
    labels: Alternatives = field(default_factory=list)
    samples: Alternatives = field(default_factory=list)


def check_request(body: GenerateBody, *, vocab_size: int, max_length: int) -> None:
    """See that the model has what a body asks for.

    Args:
        body: of POST /generate.
        vocab_size: of the model.
        max_length: most tokens of a sequence; 0 = any number.

    Raises:
        UsageError: it has not.
    """
    largest = max(max(ids, default=0) for ids in (body.input_ids, *(body.labels or ())))
    refuse(
        sentences(
            (
                max_length and len(body.input_ids) > max_length,
                f"input_ids has {len(body.input_ids)} tokens; --megatron-server-max-length is {max_length}",
            ),
            (largest >= vocab_size, f"token id {largest} is not in the teacher's vocabulary of {vocab_size}"),
            (
                body.top_logprobs_num > vocab_size,
                f"top_logprobs_num {body.top_logprobs_num} exceeds the vocabulary of {vocab_size}",
            ),
        )
    )


def answer_of(body: GenerateBody, score: Score, *, weight_version: str, latency_s: float) -> dict[str, Any]:
    """The answer in SGLang's shape: entries [log-prob, token id, None], the first without a log-prob."""
    first = [None, body.input_ids[body.start], None]
    rest = zip(score.log_probs, body.input_ids[body.start + 1 :], strict=True)
    meta_info: dict[str, Any] = {
        "id": body.rid,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(body.input_ids),
        "completion_tokens": 0,
        "weight_version": weight_version,
        "e2e_latency": latency_s,
        "input_token_logprobs": [first, *([log_prob, token, None] for log_prob, token in rest)],
        "output_token_logprobs": [],
    }
    more: dict[str, Sequence[Any]] = {
        "input_top_logprobs": score.top,
        "input_token_ids_logprobs": score.labels,
        "input_sampled_logprobs": score.samples,
    }
    for name, places in more.items():
        if places:
            meta_info[name] = [None, *([[x, token, None] for x, token in place] for place in places)]
    return {"text": "", "output_ids": [], "meta_info": meta_info}


HEARTBEAT_S = 10.0
POLL_S = 0.5
"""How soon the loop notices that the server ends."""

Update = tuple[str, int | None]
"""Path and step of new weights."""


class QueueFull(Exception):
    """As many requests wait as may."""


class JobFailed(RuntimeError):
    """The model did not do a job, by no fault of the request."""


@dataclass
class Job:
    """Something for the model to do.

    Attributes:
        work: what; a job that is `alone` is never taken together with others.
        num_tokens: how much of a batch it fills.
        result: gets the outcome.
    """

    work: Any
    num_tokens: int = 0
    alone: bool = False
    result: Future[Any] = field(default_factory=Future)


class RequestQueue:
    """Requests that wait.

    Args:
        max_jobs: that may wait.
        max_tokens: of the jobs that are taken together; one job may have more.
    """

    def __init__(self, max_jobs: int, max_tokens: int) -> None:
        self._jobs: deque[Job] = deque()
        self._max_jobs, self._max_tokens = max_jobs, max_tokens
        self._changed = threading.Condition()

    def put(self, job: Job) -> None:
        """Let a job wait.

        Raises:
            QueueFull: too many do already.
        """
        with self._changed:
            if len(self._jobs) >= self._max_jobs:
                raise QueueFull(f"{self._max_jobs} requests wait already")
            self._jobs.append(job)
            self._changed.notify()

    def take(self, timeout_s: float) -> list[Job]:
        """The next jobs, as many from the head as fit together; none after `timeout_s` without any."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._jobs), timeout_s)
            taken: list[Job] = []
            while self._jobs and self._fits(taken, self._jobs[0]):
                job = self._jobs.popleft()
                if job.result.set_running_or_notify_cancel():
                    taken.append(job)
            return taken

    def _fits(self, taken: list[Job], job: Job) -> bool:
        if not taken:
            return True
        if job.alone or taken[0].alone:
            return False
        return sum(other.num_tokens for other in taken) + job.num_tokens <= self._max_tokens

    def counts(self) -> tuple[int, int]:
        """(jobs that wait, their tokens)."""
        with self._changed:
            return len(self._jobs), sum(job.num_tokens for job in self._jobs)

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """End every job that waits with an error."""
        with self._changed:
            while self._jobs:
                job = self._jobs.popleft()
                if job.result.set_running_or_notify_cancel():
                    job.result.set_exception(make_error())


class ModelLoop:
    """One rank's loop.

    Args:
        scorer: the model.
        queue: of rank 0.
    """

    def __init__(self, scorer: Scorer, queue: RequestQueue) -> None:
        self._scorer, self._queue = scorer, queue
        self.num_running = self.num_scored = 0

    def lead(self, is_open: Callable[[], bool]) -> None:
        """Rank 0: work until the server is closed."""
        silent_s = 0.0
        try:
            while is_open():
                jobs = self._queue.take(POLL_S)
                silent_s = 0.0 if jobs else silent_s + POLL_S
                if jobs:
                    self._do(jobs)
                elif silent_s >= HEARTBEAT_S:
                    _tell(None)
                    silent_s = 0.0
        finally:
            self._queue.fail_all(lambda: JobFailed("the server ends"))
        _tell("stop")

    def follow(self) -> None:
        """The other ranks: do what rank 0 says until it says stop."""
        while (work := _hear()) != "stop":
            if work is not None:
                with contextlib.suppress(UsageError):  # rank 0 has the same, and answers it
                    self._run(work)

    def _do(self, jobs: Sequence[Job]) -> None:
        """Do jobs that were taken together; what goes wrong is theirs, and with several ranks also the loop's."""
        self.num_running = len(jobs)
        work = jobs[0].work if jobs[0].alone else [job.work for job in jobs]
        try:
            _tell(work)
            results = self._run(work)
        except Exception as error:
            if not isinstance(error, UsageError):
                logger.exception("%d requests failed", len(jobs))
            failure = error if isinstance(error, UsageError) else JobFailed(f"the model failed: {error}")
            for job in jobs:
                job.result.set_exception(failure)
            if dist.get_world_size() > 1 and not isinstance(error, UsageError):
                raise  # the ranks may not be at the same place any more
        else:
            for job, result in zip(jobs, results, strict=True):
                job.result.set_result(result)
            self.num_scored += len(jobs)
        finally:
            self.num_running = 0

    def _run(self, work: list[GenerateBody] | Update) -> Sequence[Any]:
        if isinstance(work, list):
            return self._scorer.score(work)
        self._scorer.update_weights(*work)
        return [None]


def _tell(work: Any) -> None:
    if dist.get_world_size() > 1:
        dist.broadcast_object_list([work], src=0, group=get_gloo_group())


def _hear() -> Any:
    heard: list[Any] = [None]
    dist.broadcast_object_list(heard, src=0, group=get_gloo_group())
    return heard[0]
