"""What the teacher server is asked and what it answers, as JSON: the shapes of SGLang's /generate that scoring uses.

Bodies are checked here as far as they can be without the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from slime.utils.errors import UsageError

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
        if len(given) == 2:
            raise ValueError("response_length and logprob_start_len say the same; give one")
        if self.token_ids_logprob is not None and self.label_token_ids is not None:
            raise ValueError("token_ids_logprob and label_token_ids exclude each other")
        if self.stream:
            raise ValueError("stream is not supported: an answer comes in one piece")
        length = len(self.input_ids)
        if not 0 <= self.start < length - 1:
            raise ValueError(f"{' and '.join(given)}: of {length} input_ids, 1 to {length - 1} can be scored")
        if self.label_token_ids is not None and len(self.label_token_ids) != length - 1 - self.start:
            found, wanted = len(self.label_token_ids), length - 1 - self.start
            raise ValueError(f"label_token_ids has {found} lists for {wanted} scored tokens")
        return self

    @property
    def start(self) -> int:
        """Position of the last token that is not scored."""
        if self.response_length is not None:
            return len(self.input_ids) - 1 - self.response_length
        return self.logprob_start_len or 0


class UpdateBody(BaseModel):
    """POST /update_weights_from_disk."""

    model_config = ConfigDict(extra="forbid")

    model_path: str
    """HF directory or Megatron checkpoint root, of a model of the same shape."""
    ckpt_step: Annotated[int, Field(ge=0)] | None = None
    weight_version: str | None = None
    """Name of the new weights in answers; default: the old number plus one."""


@dataclass(frozen=True)
class ScoreRequest:
    """One sequence to score; plain values, which travel between ranks."""

    tokens: list[int]
    start: int
    """Tokens behind this position are scored."""
    top_n: int = 0
    label_ids: list[list[int]] | None = None
    """Per scored token."""
    sample_n: int = 0
    seed: int = 0

    @property
    def num_scored(self) -> int:
        """Tokens that get a log-prob."""
        return len(self.tokens) - 1 - self.start


@dataclass
class Score:
    """What the model says about one sequence, per scored token."""

    log_probs: list[float]
    top: Alternatives = field(default_factory=list)
    labels: Alternatives = field(default_factory=list)
    samples: Alternatives = field(default_factory=list)


def request_of(body: GenerateBody, *, vocab_size: int, max_length: int) -> ScoreRequest:
    """The request of a body.

    Args:
        body: of POST /generate.
        vocab_size: of the model.
        max_length: most tokens of a sequence; 0 = any number.

    Raises:
        UsageError: what is asked for is not in this model.
    """
    labels = body.label_token_ids
    if body.token_ids_logprob is not None:
        labels = [body.token_ids_logprob] * (len(body.input_ids) - 1 - body.start)
    if max_length and len(body.input_ids) > max_length:
        raise UsageError(f"input_ids has {len(body.input_ids)} tokens; --megatron-server-max-length is {max_length}")
    largest = max(max(ids, default=0) for ids in (body.input_ids, *(labels or ())))
    if largest >= vocab_size:
        raise UsageError(f"token id {largest} is not in the teacher's vocabulary of {vocab_size}")
    if body.top_logprobs_num > vocab_size:
        raise UsageError(f"top_logprobs_num {body.top_logprobs_num} exceeds the vocabulary of {vocab_size}")
    return ScoreRequest(body.input_ids, body.start, body.top_logprobs_num, labels, body.sample_n, body.sample_seed)


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
