"""Mathematics: one response, scored by its boxed answer."""

from __future__ import annotations

from typing import Any

from slime.rollout.rm_hub import get_deepscaler_rule_based_reward
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.generators.base_generator import BaseGenerator
from slime_plugins.rollout_buffer.protocol import Prompt

TASK_TYPE = "math"


class MathGenerator(BaseGenerator):
    """Rewards as --rm-type deepscaler."""

    async def reward(self, prompt: Prompt, sample: Sample) -> float:
        return float(get_deepscaler_rule_based_reward(sample.response, prompt.label))


def run_rollout(data: dict[str, Any]) -> None:
    """Generate the prompts of the client."""
    MathGenerator(data).run()
