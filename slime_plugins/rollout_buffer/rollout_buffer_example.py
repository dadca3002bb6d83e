"""A rollout function that lets a buffer server generate, and takes the groups from it.

    --rollout-function-path slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout
    --rollout-buffer-url http://host:8889 --rollout-task-type arithmetic

The data source's prompts travel to the generator with the request, and those that come back without a complete group
return to the data source: none is lost. Each request is a round with an id of its own, which is part of every
instance_id: groups of an earlier round, and those of prompts that were not sent, are refused and counted. A generator
that reads prompts itself (--prompt-data names the file in the request) is sent none with
--disable-rollout-global-dataset: then any group is taken, and gets the number of a prompt and nothing else of it.

Waits: for groups of the server, asked for every half second, until the batch is full, or a share of it
(--min-batch-collection-ratio) with nothing new, or --fetch-trajectory-retry-times empty answers in a row, or nothing
new for as long as one engine request may take (--sglang-router-request-timeout-secs); the last two are errors. A
generator that still runs when the batch is taken is told to stop and waited for (a minute), so that no request of its
own is in flight during a weight sync; one that does not listen is left running, with a warning.

Evaluation is slime's own: it needs no generator.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from typing import Any

from slime.config.args import Args
from slime.processes.wait import WaitTimeout, wait_async
from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.collector import Collector
from slime.rollout.hooks.returns import draw_groups, return_groups
from slime.rollout.hooks.sample_errors import SampleError, blame, check_completed, check_reward, describe
from slime.rollout.sample_hooks import apply_rollout_sample_hooks, set_current_rollout_id
from slime.rollout.sampling.engine_request import router_url
from slime.rollout.sampling.generation import GenerateState, fresh_copy
from slime.rollout.sampling.scoring import score_each, score_group
from slime.utils import async_utils
from slime.utils.http.api_keys import key_of, protect_service
from slime.utils.http_utils import HttpError, get, get_rollout_num_engines, post
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.misc import SingletonMeta, needed
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.protocol import Record

logger = logging.getLogger(__name__)
Group = list[Sample]
POLL_S = 0.5
STOP_S = 60.0
_IDENTITY = ("index", "group_index", "rollout_id", "metadata")
_FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


def generate_rollout(args: Args, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
    """One rollout of `rollout_batch_size` groups from the buffer server, or an evaluation by slime itself.

    Raises:
        HttpError: the server cannot be reached, or refuses.
        RuntimeError: the generator failed, or ended without a single group.
        WaitTimeout: it brought nothing new in time.
        SampleError: a record cannot be used.
    """
    if evaluation:
        return sglang_rollout.generate_rollout(args, rollout_id, data_buffer, evaluation=True)
    return async_utils.run(_Rollout(args, rollout_id, data_buffer).run())


class BufferClient(metaclass=SingletonMeta):
    """The requests to the server; one in a process."""

    def __init__(self, args: Args) -> None:
        self.url = needed(args.rollout_buffer_url).rstrip("/")
        protect_service(self.url)
        self._is_fresh = self._goes_on = self._has_refused = False

    async def begin(self) -> None:
        """Before the first rollout: end and forget what an earlier run left on the server."""
        if not self._is_fresh:
            await self.stop(clear=True)
            self._is_fresh = True

    async def start(self, data: dict[str, Any]) -> bool:
        """Start a generator; False when one runs already."""
        return bool((await post(f"{self.url}/start_rollout", data))["started"])

    def note_refused(self, instance_id: str, name: str) -> None:
        """Say once that groups are refused; each rollout counts them."""
        if self._has_refused:
            return
        self._has_refused = True
        logger.warning(
            "a group of %s is refused, and so are others like it: its instance_id %r is of no prompt that this round "
            "asked for (metric rollout_buffer/refused_groups)",
            *(name, instance_id),
        )

    async def fetch(self, max_groups: int) -> dict[str, Any]:
        """Take complete groups; a repeated request gets the same ones."""
        return await post(f"{self.url}/get_rollout_data", {"max_groups": max_groups, "request_id": uuid.uuid4().hex})

    async def stop(self, *, clear: bool = False) -> None:
        """Tell the generator to stop, and wait until it did.

        Raises:
            WaitTimeout: it did not within a minute.
        """
        if (await post(f"{self.url}/stop_rollout", {"clear": False}, max_retries=3))["running"]:
            await self.wait_until_idle(STOP_S)
        if clear:
            await post(f"{self.url}/stop_rollout", {"clear": True}, max_retries=3)

    async def wait_until_idle(self, deadline_s: float) -> None:
        """Wait until the generator that runs has ended.

        Raises:
            WaitTimeout: it has not.
        """

        async def is_idle() -> bool:
            return not (await get(f"{self.url}/status", max_retries=3))["running"]

        await wait_async(f"the generator of {self.url} to stop", deadline_s, is_idle, interval_s=0.1)

    async def pause(self) -> None:
        """`stop` between two rollouts; a generator that goes on all the same is left running from then on."""
        if self._goes_on:
            return
        try:
            await self.stop()
        except WaitTimeout:
            self._goes_on = True
            logger.warning(
                "the generator of %s does not stop when it is told to (GET /status), so its requests are in flight "
                "during weight syncs, and its tokens may be of older weights",
                self.url,
            )


class _Rollout:
    """One rollout: draws prompts, has them generated, and collects until the batch is full."""

    def __init__(self, args: Args, rollout_id: int, source: Any) -> None:
        self.args, self.rollout_id, self.source = args, rollout_id, source
        self.name = f"the generator for --rollout-task-type {args.rollout_task_type}"
        self.client, self.state = BufferClient(args), GenerateState(args)
        self.collector = Collector(args, rollout_id)
        self._infos: dict[str, tuple[float, int]] = {}
        self._num_refused, self._refused_id = 0, ""
        self.drawn: dict[str, Group] = {}
        self._sends_prompts = True

    async def run(self) -> RolloutFnTrainOutput:
        set_current_rollout_id(self.rollout_id)
        await self.client.begin()
        try:
            while not self._is_enough(self._num_accepted()):
                before = self._num_accepted() + len(self.collector.dropped)
                await self._round()
                if self._num_accepted() + len(self.collector.dropped) == before:
                    raise RuntimeError(
                        f"{self.name} at {self.client.url} ended without a single complete group of "
                        f"{self.args.n_samples_per_prompt} records{self._refusals()}; see the log of the server"
                    )
            self._keep_whole_steps()
        finally:
            self._give_back()
        output = sglang_rollout.finish_rollout(self.args, self.collector, self.source)
        output.metrics = {**(output.metrics or {}), **self._metrics()}
        return output

    async def _round(self) -> None:
        """Have as many prompts generated as groups are missing, and collect what comes of them."""
        groups = draw_groups(self.args, self.source, self._num_missing())
        finished = [group for group in groups if _is_finished(group)]  # more than the rollout before it could use
        begun = [[fresh_copy(sample) for sample in group] for group in groups if not _is_finished(group)]
        self.drawn = _by_instance_id([*self.drawn.values(), *begun])
        self._sends_prompts = any(_has_prompt(group[0]) for group in self.drawn.values())
        for group in finished:
            self._offer(group)
        if not self.drawn:
            return
        await self._start()
        try:
            await self._collect()
        except BaseException:
            with contextlib.suppress(HttpError):  # the error at hand says more
                await self.client.pause()
            raise
        await self.client.pause()
        if self.drawn and self._num_missing():
            await self._fetch()  # what was finished while the generator stopped

    async def _collect(self) -> None:
        num_empty, news = 0, time.monotonic()
        allowed, deadline_s = self.args.fetch_trajectory_retry_times, self.args.sglang_router_request_timeout_secs
        while self.drawn and self._num_missing():
            answer, num_taken = await self._fetch()
            if num_taken:
                num_empty, news = 0, time.monotonic()
                continue
            is_empty, status = not answer["data"]["data"], answer["status"]  # else every group was refused
            if is_empty and status["error"]:
                raise RuntimeError(f"the generator for task {status['task_type']} failed: {status['error']}")
            if is_empty and (not status["running"] or self._is_enough(self._num_accepted())):
                return
            num_empty += is_empty
            if 0 <= allowed < num_empty or time.monotonic() - news > deadline_s:
                limit = f"{num_empty} empty answers (--fetch-trajectory-retry-times {allowed})"
                raise WaitTimeout(
                    f"waited {time.monotonic() - news:.0f} s, {limit}, for a group of {self.client.url}; "
                    f"{self._num_accepted()} of {self.args.rollout_batch_size} are there{self._refusals()}: {status}"
                )
            if is_empty:
                await asyncio.sleep(POLL_S)

    async def _start(self) -> None:
        """Start the generator; one that still runs has the prompts of an earlier round and is waited for first."""
        data = self._start_data()
        while not await self.client.start(data) and data["prompts"]:
            await self.client.wait_until_idle(self.args.sglang_router_request_timeout_secs)

    async def _fetch(self) -> tuple[dict[str, Any], int]:
        """(an answer of the server, how many groups of it were taken)."""
        answer = await self.client.fetch(min(self._num_missing(), len(self.drawn)))
        return answer, await self._take(answer["data"])

    async def _take(self, data: dict[str, Any]) -> int:
        """Turn the records of complete groups into samples, and offer them; returns how many groups were taken."""
        by_instance: dict[str, list[Record]] = {}
        for item in data["data"]:
            record = Record.model_validate(item)
            by_instance.setdefault(record.instance_id, []).append(record)
        self._note(data["meta_info"], len(by_instance))
        num_taken = 0
        for instance_id, records in by_instance.items():
            # A generator that was sent no prompts names its own: any drawn group gives its numbers, it has no more.
            known = instance_id if self._sends_prompts else next(iter(self.drawn), None)
            if known not in self.drawn:
                self._refuse(instance_id)
                continue
            num_taken += 1
            group = self._group(self.drawn[known], records)
            group = await apply_rollout_sample_hooks(self.args, group, evaluation=False)
            if self.args.group_rm:
                await score_group(self.args, group)
            else:
                await score_each(self.args, group, evaluation=False)
            del self.drawn[known]
            self._offer(group)
        return num_taken

    def _refuse(self, instance_id: str) -> None:
        self._num_refused, self._refused_id = self._num_refused + 1, self._refused_id or instance_id
        self.client.note_refused(instance_id, self.name)

    def _refusals(self) -> str:
        """For an error: which groups were refused, and what may be done about it."""
        if not self._num_refused:
            return ""
        return (
            f" ({self._num_refused} groups were refused: instance_id {self._refused_id!r} is of no prompt that was "
            "sent; a generator that reads prompts itself needs --disable-rollout-global-dataset)"
        )

    def _note(self, info: dict[str, Any], num_groups: int) -> None:
        """Add up what the generator says of its groups; means are weighted by the number of groups."""
        for key, value in info.items():
            if not isinstance(value, int | float):
                continue
            total, weight = self._infos.get(key, (0.0, 0))
            self._infos[key] = (total + value * (num_groups if key.startswith("avg_") else 1), weight + num_groups)

    def _metrics(self) -> dict[str, float]:
        infos = self._infos.items()
        metrics = {f"rollout_buffer/{k}": total / n if k.startswith("avg_") else total for k, (total, n) in infos}
        return metrics | {"rollout_buffer/refused_groups": float(self._num_refused)}

    def _group(self, origins: Group, records: list[Record]) -> Group:
        if len(records) < len(origins):
            raise SampleError(
                f"{self.name} made a group of {len(records)} records for {describe(origins[0])}; "
                f"--n-samples-per-prompt is {len(origins)}, and its is_valid_group must ask for as many"
            )
        return [self._sample(origin, record) for origin, record in zip(origins, records, strict=False)]

    def _sample(self, origin: Sample, record: Record) -> Sample:
        data = origin.to_dict() | {"metadata": {**origin.metadata, **record.extra_info}, "status": "completed"}
        with blame(self.name, origin):
            if record.sample is not None:
                sample = Sample.from_dict(data | {k: v for k, v in record.sample.items() if k not in _IDENTITY})
            else:
                sample = Sample.from_dict(data)
                self._tokenize(sample, record.messages or [])
            if record.reward is not None:
                sample.reward = record.reward
                check_reward(self.args, self.name, sample, record.reward)
            check_completed(self.args, self.name, origin, sample)
        return sample

    def _tokenize(self, sample: Sample, messages: list[dict[str, Any]]) -> None:
        """A conversation without tokens: the loss mask of its template, and no log-probs of the engine."""
        masks = MultiTurnLossMaskGenerator(self.state.tokenizer, self.args.loss_mask_type)
        token_ids, mask = masks.get_loss_mask(messages, tools=sample.metadata.get("tools"))
        length = masks.get_response_lengths([mask])[0]
        sample.prompt, sample.tokens, sample.response_length = messages, token_ids, length
        sample.loss_mask = mask[len(mask) - length :]
        sample.response = self.state.tokenizer.decode(token_ids[len(token_ids) - length :])
        sample.status = Sample.Status.COMPLETED

    def _offer(self, group: Group) -> None:
        self.collector.offer(group, num_expected=self._num_accepted() + len(self.drawn) + 1)

    def _num_accepted(self) -> int:
        return len(self.collector.accepted)

    def _num_missing(self) -> int:
        return self.args.rollout_batch_size - self._num_accepted()

    def _is_enough(self, num_groups: int) -> bool:
        return num_groups >= least_groups(self.args)

    def _keep_whole_steps(self) -> None:
        """Of a batch that is not full, keep the groups that fill whole train steps; the others wait in the source."""
        accepted, per_group = self.collector.accepted, self.args.n_samples_per_prompt
        if len(accepted) == self.args.rollout_batch_size or self.args.drop_last_rollouts:
            return
        step = math.lcm(self.args.global_batch_size, per_group) // per_group
        kept = len(accepted) // step * step
        return_groups(self.args, self.source, accepted[kept:])
        del accepted[kept:]

    def _give_back(self) -> None:
        if self.drawn:
            return_groups(self.args, self.source, list(self.drawn.values()))
            self.drawn = {}

    def _start_data(self) -> dict[str, Any]:
        args, state = self.args, self.state
        if any(group[0].multimodal_inputs for group in self.drawn.values()):
            raise ValueError("the rollout buffer takes no images (--multimodal-keys)")
        prompts = [
            {
                "instance_id": instance_id,
                "prompt": group[0].prompt,
                "input_ids": list(state.encode(group[0].prompt)) if isinstance(group[0].prompt, str) else None,
                "label": group[0].label,
                "metadata": group[0].metadata,
            }
            for instance_id, group in self.drawn.items()
            if self._sends_prompts
        ]
        return {
            "task_type": args.rollout_task_type,
            "num_repeat_per_sample": args.n_samples_per_prompt,
            "prompts": prompts,
            "input_file": args.prompt_data,
            "num_epoch": args.num_epoch or 1,
            "num_process": args.sglang_server_concurrency * get_rollout_num_engines(args),
            "tokenizer_path": args.hf_checkpoint,
            "sampling_params": state.sampling_params,
            "remote_engine_url": router_url(args),
            "remote_engine_key": key_of(router_url(args)),
            "remote_buffer_url": self.client.url,
            "request_timeout_s": float(args.sglang_router_request_timeout_secs),
        }


def _by_instance_id(groups: list[Group]) -> dict[str, Group]:
    """Each group under a name that no other round gives: its number, the round's id, its place in the round."""
    round_id = uuid.uuid4().hex[:12]
    return {f"{group[0].group_index}-{round_id}-{place}": group for place, group in enumerate(groups)}


def _has_prompt(sample: Sample) -> bool:
    """Whether a sample is more than its numbers, which is all that --disable-rollout-global-dataset gives."""
    return sample != Sample(group_index=sample.group_index, index=sample.index)


def _is_finished(group: Group) -> bool:
    return all(sample.status in _FINISHED for sample in group)


def least_groups(args: Args) -> int:
    """Groups that are enough to go on (--min-batch-collection-ratio)."""
    return math.ceil(args.min_batch_collection_ratio * args.rollout_batch_size)
