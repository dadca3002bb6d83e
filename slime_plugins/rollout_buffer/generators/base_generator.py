"""A generator to inherit from: completes the prompts of the client on the engines, and writes a record per response.

    from slime_plugins.rollout_buffer.generators.base_generator import BaseGenerator

    class MyGenerator(BaseGenerator):
        async def reward(self, prompt, sample):
            return float(sample.response.strip() == str(prompt.label))

    TASK_TYPE = "mine"

    def run_rollout(data):
        MyGenerator(data).run()

Override `reward`, or `rollout` for several turns. Tokens and log-probs are the engine's own, so nothing is tokenised
again. A response that fails is logged and not written; its group stays incomplete, and the client asks again.

Waits: `run` ends when every response is written or failed, or when the server says stop; then what is in flight is
cancelled, which closes its connections, and the engines end it. Each request has a deadline. A full buffer is waited
for at most as long as one engine request may take.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any

from slime.utils.async_utils import cancel_all, gather_or_cancel, is_cancellation
from slime.utils.http.api_keys import protect, protect_service
from slime.utils.http_utils import HttpError, close_http_client, get, post
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.protocol import Prompt, Record, StartRollout

logger = logging.getLogger(__name__)
_WATCH_S = 0.5
_FULL_S = 1.0


class BaseGenerator:
    """One run.

    Args:
        data: the body of /start_rollout.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self.request = StartRollout.model_validate(data)
        self._places = asyncio.Semaphore(self.request.num_process)
        self._stopped = asyncio.Event()
        self.num_failed = 0

    async def reward(self, prompt: Prompt, sample: Sample) -> float | dict[str, Any] | None:
        """Score a response; None leaves it to the client (--rm-type, --custom-rm-path)."""
        return None

    async def rollout(self, prompt: Prompt, sample: Sample) -> None:
        """Complete the sample, which has the prompt's tokens. The default is one call to the engine."""
        await self.generate(sample)

    async def generate(self, sample: Sample, **sampling_params: Any) -> None:
        """One call to the engine; its answer is appended to the sample.

        Args:
            sampling_params: on top of those of the client.
        """
        if not sample.tokens:
            raise ValueError("the prompt is a message list; --apply-chat-template turns it into text with tokens")
        params = {**self.request.sampling_params, **sampling_params}
        payload = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
        async with asyncio.timeout(self.request.request_timeout_s):
            output = await post(f"{self.request.remote_engine_url}/generate", payload)
        meta = output["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        sample.append_response_tokens(
            tokens=[pair[1] for pair in pairs],
            log_probs=[pair[0] for pair in pairs],
            meta_info=meta,
            text=output.get("text"),
        )

    def run(self) -> None:
        """Generate everything that was asked for, until done or told to stop.

        Raises:
            RuntimeError: every response failed.
        """
        asyncio.run(self._run())

    async def _run(self) -> None:
        protect(self.request.remote_engine_url, self.request.remote_engine_key)
        protect_service(self.request.remote_buffer_url)
        watcher = asyncio.create_task(self._watch())
        calls = [
            self._one(prompt, number)
            for prompt in self.request.prompts
            for number in range(self.request.num_repeat_per_sample)
        ]
        work = asyncio.ensure_future(gather_or_cancel(calls))
        stop = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            await cancel_all((work, stop, watcher))
            await close_http_client()
        if calls and self.num_failed == len(calls):
            raise RuntimeError(f"all {len(calls)} responses failed; see the log of the buffer server")

    async def _watch(self) -> None:
        while True:
            try:
                status = await get(f"{self.request.remote_buffer_url}/status", max_retries=3)
                if status["stopping"]:
                    self._stopped.set()
            except HttpError as error:
                logger.warning("the buffer server does not say whether to go on: %s", error)
            await asyncio.sleep(_WATCH_S)

    async def _one(self, prompt: Prompt, number: int) -> None:
        async with self._places:
            try:
                sample = Sample(prompt=prompt.prompt, label=prompt.label, tokens=list(prompt.input_ids or []))
                await self.rollout(prompt, sample)
                if sample.status is Sample.Status.ABORTED:
                    raise RuntimeError("the engine aborted it")
                reward = await self.reward(prompt, sample)
                await self._write(record_of(prompt, sample, reward))
            except BaseException as error:  # one response of many: its group stays incomplete and is asked for again
                if is_cancellation(error):
                    raise
                self.num_failed += 1
                logger.warning(
                    "response %d to prompt %s failed: %s: %s", number, prompt.instance_id, type(error).__name__, error
                )

    async def _write(self, record: Record) -> None:
        deadline = time.monotonic() + self.request.request_timeout_s
        while True:
            try:
                answer = await post(f"{self.request.remote_buffer_url}/buffer/write", record.model_dump())
            except HttpError as error:
                if error.status != 429 or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_FULL_S)
                continue
            if answer["stop"]:
                self._stopped.set()
            return


_KEPT = (
    *("tokens", "response", "response_length", "loss_mask", "rollout_log_probs", "weight_versions", "status"),
    *("end_reason", "reward_is_trusted"),
)


def record_of(prompt: Prompt, sample: Sample, reward: float | dict[str, Any] | None) -> Record:
    """The record of a completed sample."""
    data = sample.to_dict()
    kept = {name: data[name] for name in (*_KEPT, "prefix_cache_info", "spec_info", "non_generation_time")}
    return Record(
        instance_id=prompt.instance_id,
        uid=uuid.uuid4().hex,
        sample=kept,
        reward=reward,
        extra_info={key: value for key, value in sample.metadata.items() if key not in prompt.metadata},
    )
