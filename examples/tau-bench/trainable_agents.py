"""An agent of tau-bench whose turns the engine writes: a conversation with a user and tools, in one sample.

The loop, tokens and limits are those of `slime.rollout.multi_turn`; the other side is an `Episode`. So what is trained
is what the engine wrote, and nothing is tokenised again.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import Any

from openai_tool_adapter import OpenAIToolAdapter, create_openai_adapter
from tau_environments import Episode

from slime.rollout.multi_turn import Conversation, EnvError, converse
from slime.rollout.tool_calls import ToolCall
from slime.utils.types import Sample

Status = Sample.Status
Message = dict[str, Any]


@dataclass
class InteractionResult:
    """How a conversation ended: `reward` is the environment's, 0 where turns or tokens were used up."""

    sample: Sample
    reward: float | dict[str, float]
    messages: list[Message]
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """Of the sample: COMPLETED, TRUNCATED (turns or tokens were used up) or ABORTED."""
        return self.sample.status


def call_to_action_sglang(response: str, adapter: OpenAIToolAdapter) -> ToolCall | str:
    """The action of a turn: its first call, or its text for the user."""
    return adapter.action_of(response)


class TrainableAgentMixin(Conversation):
    """A conversation whose other side is an episode."""

    def __init__(self, args: Any, sample: Sample, env: Episode, config: dict[str, Any]) -> None:
        super().__init__(args, sample)
        self.env, self.config = env, config
        self.adapter = create_openai_adapter(env.tools, config["tool_parser"])
        self.reward = 0.0

    async def asolve(self, sampling_params: dict[str, Any], evaluation: bool = False) -> InteractionResult:
        """Talk until the environment is done, or turns or tokens are used up.

        `max_new_tokens` is of a turn; --max-turns and --rollout-max-context-len bound the whole.
        """
        sample = await converse(self, sampling_params, evaluation)
        reward = Sample.reward_of(self.args, self.reward)
        return InteractionResult(sample, reward, [*self.prompt, *self.messages])

    async def write_turn(self, sampling_params: dict[str, Any], evaluation: bool) -> str:
        """Let the model write a turn of `max_new_tokens` tokens at most."""
        sample = self.sample
        start = sample.metadata.get("turn_start", len(sample.tokens)) - (len(sample.tokens) - sample.response_length)
        limit = sampling_params["max_new_tokens"] + start  # the engine's budget counts the whole response
        return await super().write_turn({**sampling_params, "max_new_tokens": limit}, evaluation)

    def append(self, answers: list[Message], sampling_params: dict[str, Any], evaluation: bool) -> str | None:
        """Append what user or tool said; only the context bounds it."""
        return super().append(answers, {**sampling_params, "max_new_tokens": math.inf}, evaluation)

    async def use_tools(self, text: str) -> list[Message]:
        """Let the environment act on a turn; no message where it is done, or has failed."""
        sample = self.sample
        action = await asyncio.to_thread(call_to_action_sglang, text, self.adapter)  # its first call imports SGLang
        is_call, started = isinstance(action, ToolCall), time.monotonic()
        sample.metadata["tool_calls"] += is_call
        try:
            if isinstance(action, ToolCall) and action.problem:
                sample.metadata["tool_errors"] += 1
                return [{"role": "tool", "content": f"error: {action.problem}"}]
            step = await self.env.step(action)
        except EnvError as error:
            sample.end_reason, sample.reward_is_trusted = "env_error", False
            sample.metadata["tau_error"] = str(error)[:500]
            return []
        finally:
            sample.non_generation_time += time.monotonic() - started
        sample.metadata["tool_errors"] += is_call and step.text.lower().startswith("error")
        if step.is_done:
            self.reward = step.reward
            return []
        return [{"role": step.role, "content": step.text[: self.config["max_observation_chars"]]}]

    def calls_made(self) -> list[ToolCall]:
        """The calls that the episode has answered so far, in order."""
        told = self.messages
        turns = [before["content"] for before, after in zip(told, told[1:], strict=False) if after["role"] == "tool"]
        actions = [call_to_action_sglang(text, self.adapter) for text in turns]
        return [action for action in actions if isinstance(action, ToolCall) and not action.problem]


class TrainableToolCallingAgent(TrainableAgentMixin):
    """The strategy "tool-calling": a turn is a call, or a text for the user."""


def agent_factory(args: Any, sample: Sample, env: Episode, config: dict[str, Any]) -> TrainableAgentMixin:
    """The agent of the run's `agent_strategy`."""
    return {"tool-calling": TrainableToolCallingAgent}[config["agent_strategy"]](args, sample, env, config)
