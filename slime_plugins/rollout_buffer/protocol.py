"""What the server, the generators and the client say to each other: the bodies of the requests.

Unknown fields travel on untouched: a generator may send and read what it likes. It knows no network.
"""

from __future__ import annotations

import math
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Message(BaseModel):
    """A body; fields that are not declared are kept."""

    model_config = ConfigDict(extra="allow")


class Record(Message):
    """POST /buffer/write: one finished response.

    Attributes:
        instance_id: the prompt's, as it was sent; the records of one make a group.
        uid: the response; a second record with the same one is dropped (a request that was repeated).
        messages: the conversation. The client tokenises it; its log-probs are unknown then.
        sample: instead of it, what `Sample.to_dict` has of the response: tokens, log-probs, mask.
        reward: a number, or a dict for --reward-key; None: the client scores it.
        extra_info: becomes part of `Sample.metadata`.
    """

    instance_id: str = Field(min_length=1)
    uid: str | None = None
    messages: list[dict[str, Any]] | None = None
    sample: dict[str, Any] | None = None
    reward: float | dict[str, Any] | None = None
    extra_info: dict[str, Any] = {}

    @field_validator("instance_id", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) else value

    @field_validator("reward")
    @classmethod
    def _is_finite(cls, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"the reward {value} is not finite")
        return value

    @model_validator(mode="after")
    def _has_a_response(self) -> Self:
        if not self.messages and not self.sample:
            raise ValueError("a record has messages or a sample")
        return self


class Prompt(Message):
    """One prompt that the client wants completed.

    Attributes:
        instance_id: to be given back in the records; it says in which round the prompt was sent.
        prompt: as in the data: a text or a list of messages.
        input_ids: a text's tokens.
        label, metadata: of the sample.
    """

    instance_id: str
    prompt: str | list[dict[str, Any]]
    input_ids: list[int] | None = None
    label: Any = None
    metadata: dict[str, Any] = {}


class StartRollout(Message):
    """POST /start_rollout: run a generator. Its `run_rollout` gets all of this as a dict.

    Attributes:
        task_type: which generator (its TASK_TYPE).
        num_repeat_per_sample: responses per prompt = records of a group.
        prompts: what to generate. A generator that reads prompts itself takes input_file instead.
        input_file, num_epoch, num_process, skip_instance_ids, tokenizer_path: for such a generator.
        sampling_params: of SGLang.
        remote_engine_url: where it generates (the router).
        remote_engine_key: the API key that the router asks for.
        remote_buffer_url: where it writes (this server).
        request_timeout_s: of one request to the engine.
    """

    task_type: str
    num_repeat_per_sample: int = Field(ge=1)
    prompts: list[Prompt] = []
    input_file: str | None = None
    num_epoch: int = Field(default=1, ge=1)
    num_process: int = Field(default=64, ge=1)
    skip_instance_ids: list[str] = []
    tokenizer_path: str | None = None
    sampling_params: dict[str, Any] = {}
    remote_engine_url: str
    remote_engine_key: str | None = Field(default=None, repr=False)
    remote_buffer_url: str
    request_timeout_s: float = Field(default=3600.0, gt=0)


class GetRolloutData(Message):
    """POST /get_rollout_data: take finished groups.

    Attributes:
        max_groups: at most so many; None takes all.
        request_id: the same id again gets the same answer: a client that lost one asks again without losing groups.
    """

    max_groups: int | None = Field(default=None, ge=1)
    request_id: str | None = None


class StopRollout(Message):
    """POST /stop_rollout: ask the generator to end; with `clear`, forget what is buffered."""

    clear: bool = False
