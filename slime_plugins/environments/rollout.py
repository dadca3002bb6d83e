"""A generate function over environments of other frameworks.

    --custom-generate-function-path slime_plugins.environments.generate --custom-config-path environment.yaml

    environment: {framework: verifiers, name: letter_counts, python: venvs/verifiers/bin/python, paths: [my_tasks]}

A row of the data names a task (`metadata["environment"]["task"]`; tools/prepare_environment.py writes such rows). An
environment that takes the model's turns (reasoning-gym, OpenEnv) is a conversation of slime.rollout.multi_turn whose
other side it writes. One that asks the model itself (verifiers) gets the address and a key of the agent gateway, which
keeps the tokens. Either gives the reward; a sample that has one is not scored again.

What the environment does wrong says nothing about the policy: then `end_reason` is "env_error" and
`reward_is_trusted` false.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from pathlib import Path
from typing import Any

from slime.agent.gateway import Budget, Gateway, shared_gateway
from slime.config.args import Args
from slime.rollout.multi_turn import Conversation
from slime.rollout.sampling.generation import GenerateState
from slime.rollout.tool_calls import parse_tool_calls
from slime.utils.async_utils import cancel_all
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from slime_plugins.environments.process import (
    KEY,
    MARGIN_S,
    EnvironmentFailure,
    EnvironmentProcess,
    Environments,
    EnvironmentSettings,
    check_args,
    read_settings,
)

logger = logging.getLogger(__name__)
Status = Sample.Status
MODEL = "slime-actor"
_LOOK_S = 0.2
_CUT_OFF = ("max_turns", "length")


async def generate(
    args: Args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Complete one sample in an episode of the environment.

    Args:
        args: reads `environment` of the custom config, `max_turns`, and what the default generate function reads.
        sample: its metadata names the task. One that was aborted begins anew: an episode cannot be kept.
        sampling_params: SGLang's.
        evaluation: it is not aborted.

    Returns:
        The sample with its reward, or the list of them where the conversation of an environment that asks the model
        itself branched.

    Raises:
        ValueError: the row names no task.
        RuntimeError: the environment's process cannot be started, or ended too often.
    """
    task = task_of(sample)
    environments = Environments(_settings(args), Path(args.output_dir).absolute() / "logs")
    async with environments.place() as process:
        if process.info["drives_model"]:
            return await _Play(args, sample, sampling_params, evaluation=evaluation).run(process, task)
        return await _converse(args, sample, sampling_params, evaluation, process, task)


generate.check_args = check_args  # type: ignore[attr-defined]


def task_of(sample: Sample) -> int:
    """The task that a row names.

    Raises:
        ValueError: it names none.
    """
    named = sample.metadata.get(KEY)
    task = named.get("task") if isinstance(named, dict) else None
    if not isinstance(task, int) or isinstance(task, bool):
        raise ValueError(
            f"sample {sample.index} has no metadata['environment']['task'], the number of its task; "
            "tools/prepare_environment.py tasks writes rows that have it"
        )
    return task


def _settings(args: Args) -> EnvironmentSettings:
    settings = read_settings(vars(args).get(KEY))
    if settings.framework != "verifiers" or not args.max_turns:
        return settings
    agent = {"max_turns": args.max_turns, **settings.arguments.get("agent", {})}
    return settings.model_copy(update={"arguments": {**settings.arguments, "agent": agent}})


class _Warned(metaclass=SingletonMeta):
    """Whether this process has warned of prompts that differ from the data's."""

    of_prompts = False


async def _converse(
    args: Args,
    sample: Sample,
    params: dict[str, Any],
    evaluation: bool,
    process: EnvironmentProcess,
    task: int,
) -> Sample:
    """An episode of an environment that takes the model's turns."""
    untouched, episode = sample.snapshot(), ""
    try:
        started = await process.ask("start", task=task)
        episode = started["episode"]
        _take_prompt(sample, started)
        conversation = Conversation(args, sample)
        await conversation.begin()
        reason = await _take_turns(args, conversation, params, evaluation, process, episode)
        if reason is None:
            untouched.status, untouched.end_reason = Status.ABORTED, "aborted"
            return untouched
        result = await process.ask("finish", episode=episode)
        episode = ""
    except EnvironmentFailure as error:
        return _failed(args, sample, error)
    finally:
        if episode:
            await process.tell("finish", episode=episode)
    conversation.measure_drift()
    sample.status = Status.TRUNCATED if reason in _CUT_OFF else Status.COMPLETED
    sample.end_reason, sample.reward = reason, Sample.reward_of(args, result["reward"])
    _note(sample, metrics=result["metrics"])
    return sample


def _take_prompt(sample: Sample, started: dict[str, Any]) -> None:
    """The episode's own prompt; one that differs from the data's makes groups of different prompts."""
    if sample.prompt != started["messages"]:
        if not _Warned().of_prompts:
            _Warned().of_prompts = True
            logger.warning(
                "the environment begins task %s otherwise than the data's row: the number does not decide it, or the "
                "rows were made with other arguments. The samples of a group may have different prompts",
                task_of(sample),
            )
        sample.prompt = started["messages"]
    if started["tools"]:
        sample.metadata = {**sample.metadata, "tools": started["tools"]}


async def _take_turns(
    args: Args,
    conversation: Conversation,
    params: dict[str, Any],
    evaluation: bool,
    process: EnvironmentProcess,
    episode: str,
) -> str | None:
    """Let model and environment talk; returns why it ended, None where the rollout ended first."""
    sample = conversation.sample
    while True:
        text = await conversation.write_turn(params, evaluation)
        if sample.status is Status.ABORTED:
            return None
        if sample.status is Status.TRUNCATED:
            return "length"
        calls = [vars(call) for call in parse_tool_calls(text)]
        answer = await process.ask("step", episode=episode, text=text, calls=calls)
        sample.metadata["tool_calls"] += len(calls)
        if answer["done"] or not answer["messages"]:
            return "done"
        if reason := conversation.append(answer["messages"], params, evaluation):
            return reason
        if GenerateState(args).aborted and not evaluation:
            return None


class _Play:
    """An episode that the environment plays itself, with the model behind the agent gateway."""

    def __init__(self, args: Args, sample: Sample, params: dict[str, Any], *, evaluation: bool) -> None:
        self.args, self.sample, self.evaluation = args, sample, evaluation
        self.sampling = {name: value for name, value in params.items() if value is not None}

    async def run(self, process: EnvironmentProcess, task: int) -> Sample | list[Sample]:
        """Play it, and make the samples of its session."""
        args, sample = self.args, self.sample
        limit = args.eval_max_context_len if self.evaluation else args.rollout_max_context_len
        gateway = await shared_gateway(args)
        key = gateway.open_session(
            sampling=self.sampling,
            max_context_tokens=limit or 0,
            budget=Budget(turns=args.max_turns),
            evaluation=self.evaluation,
        )
        try:
            result = await self._until_aborted(process, task, f"{gateway.url}/v1", key)
            if result is None or gateway.end_reason(key) == "aborted":
                sample.status, sample.end_reason = Status.ABORTED, "aborted"
                return sample
            return await self._samples(gateway, key, result)
        except EnvironmentFailure as error:
            return _failed(args, sample, error)
        finally:
            await gateway.drop_session(key)

    async def _until_aborted(
        self, process: EnvironmentProcess, task: int, base_url: str, key: str
    ) -> dict[str, Any] | None:
        run, settings = secrets.token_hex(8), process.settings
        sampling = {
            "temperature": self.sampling.get("temperature"),
            "top_p": self.sampling.get("top_p"),
            "max_tokens": self.sampling.get("max_new_tokens"),
        }
        body = {
            "task": task,
            "run": run,
            "base_url": base_url,
            "api_key": key,
            "model": MODEL,
            "sampling": {name: value for name, value in sampling.items() if value is not None},
        }
        playing = asyncio.ensure_future(process.ask("run", timeout_s=settings.episode_timeout_s + MARGIN_S, **body))
        try:
            while not playing.done():
                await asyncio.wait([playing], timeout=_LOOK_S)
                if GenerateState(self.args).aborted and not self.evaluation:
                    return None
            return await playing
        finally:
            if not playing.done():
                await cancel_all([playing])
            if playing.cancelled() or playing.exception() is not None:
                await process.tell("cancel", run=run)

    async def _samples(self, gateway: Gateway, key: str, result: dict[str, Any]) -> Sample | list[Sample]:
        """The session's samples; an error that the end of the session caused is not the environment's."""
        args, error = self.args, result["error"]
        if error is not None and gateway.end_reason(key) is None:
            return _failed(args, self.sample, EnvironmentFailure(error))
        samples = await gateway.finish_session(
            key,
            base_sample=self.sample,
            reward=Sample.reward_of(args, result["reward"]),
            extra_metadata=self.sample.metadata,
        )
        if not samples:
            return _failed(args, self.sample, EnvironmentFailure("the episode ended without a call of the model"))
        for one in samples:
            one.train_metadata = self.sample.train_metadata
            _note(one, metrics=result["metrics"])
        return samples[0] if len(samples) == 1 else samples


def _note(sample: Sample, **found: Any) -> None:
    sample.metadata = {**sample.metadata, KEY: {**sample.metadata.get(KEY, {}), **found}}


def _failed(args: Args, sample: Sample, error: Exception) -> Sample:
    """A sample that counts and trains nothing: what was generated is kept for the records where there is some."""
    logger.warning("sample %s: %s", sample.index, error)
    if not sample.response_length:
        sample.tokens, sample.response_length, sample.rollout_log_probs = [0, 0], 1, [0.0]
    sample.loss_mask, sample.remove_sample = [0] * sample.response_length, True
    sample.status, sample.end_reason, sample.reward_is_trusted = Status.COMPLETED, "env_error", False
    sample.reward = Sample.reward_of(args, 0.0)
    _note(sample, error=str(error)[:500])
    return sample
