"""The parts that `benchmarks/gpu_vs_verl.py` gives to verl 0.9.1, which loads them by path or by name.

They let verl do the same work as our side, and none of it more slowly than it could:

- `QuickReplayBuffer` looks for finished samples ten times a second. verl's own sleeps two seconds between two looks,
  up to two seconds of every step.
- `GivenLengths` makes one engine call for each sample, with the prompt's tokens as they are and the response length
  that the data names. It applies no chat template, so that the prompts of both sides have the same tokens.
- `compute_score` draws a reward at random, as `--rm-type random` does.

Only verl's processes import this file.
"""

from __future__ import annotations

import random
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class QuickReplayBuffer(ReplayBuffer):
    """verl's buffer, polled every 0.1 s."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, poll_interval=0.1)


class GivenLengths(AgentLoopBase):
    """One engine call that ignores the end-of-sequence token."""

    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> AgentLoopOutput:
        """Generate one response; `sample` is a row of the data, with the number of the response in its group."""
        prompt_ids = self.tokenizer.encode(sample["raw_prompt"][0]["content"])
        length = int(sample["extra_info"]["lengths"][sample["session_id"]])
        found = await self.server_manager.generate(
            request_id=uuid4().hex,
            prompt_ids=prompt_ids,
            sampling_params={**sampling_params, "max_new_tokens": length, "ignore_eos": True},
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=found.token_ids,
            response_mask=[1] * len(found.token_ids),
            response_logprobs=found.log_probs or None,
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={**found.extra_fields, "turn_scores": [], "tool_rewards": []},
        )


def compute_score(**_: Any) -> float:
    """Return 1 or 0 by chance."""
    return float(random.random() < 0.5)
