"""Conversations of a model that sees images with an environment: --custom-generate-function-path rollout.generate.

The loop, tokens, masks and limits are those of `slime.rollout.multi_turn`: what is trained is what the engine wrote,
and an observation is a message of the user, with images where the environment gives some. An aborted sample goes on.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from base_env import BaseInteractionEnv

from slime.rollout.multi_turn import Conversation, EnvError, converse
from slime.utils.misc import load_function
from slime.utils.types import Sample

DEFAULT_ENV = "env_geo3k"


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Complete a sample; `rollout_interaction_env_path` of the custom config is the module, or the file, of its
    environment, whose `build_env(sample, args)` makes one.
    """
    path = vars(args).get("rollout_interaction_env_path") or DEFAULT_ENV
    separator = ":" if path.endswith(".py") else "."
    env = load_function(f"{path}{separator}build_env")(sample=sample, args=args)
    try:
        return await converse(Interaction(args, sample, env), sampling_params, evaluation)
    finally:
        await asyncio.to_thread(env.close)


class Interaction(Conversation):
    """A conversation whose other side is an environment."""

    def __init__(self, args: Any, sample: Sample, env: BaseInteractionEnv) -> None:
        super().__init__(args, sample)
        self.env = env

    async def use_tools(self, text: str) -> list[dict[str, Any]]:
        """Let the environment answer a turn; no message where the episode ends, or it has failed."""
        sample, started = self.sample, time.monotonic()
        if self.ends_with_media:
            return []
        try:
            await asyncio.to_thread(self.env.reset, sample.metadata["round_number"] - 1)
            observation, is_done, info = await asyncio.to_thread(self.env.step, text)
            sample.metadata |= info
            if is_done:
                return []
            message = await asyncio.to_thread(self.env.format_observation, observation)
            return [{**message, "content": await self.images.read(message["content"])}]
        except EnvError as error:
            sample.end_reason, sample.reward_is_trusted = "env_error", False
            sample.metadata["env_error"] = str(error)[:500]
            return []
        finally:
            sample.metadata["tool_calls"] += bool(self.calls(text))
            sample.non_generation_time += time.monotonic() - started
