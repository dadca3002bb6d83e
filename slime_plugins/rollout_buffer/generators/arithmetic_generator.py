"""The example of docs/rollout_buffer.md: arithmetic, scored by the last number of the response."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from slime.utils.types import Sample
from slime_plugins.rollout_buffer.generators.base_generator import BaseGenerator
from slime_plugins.rollout_buffer.protocol import Prompt

TASK_TYPE = "arithmetic"


class ArithmeticGenerator(BaseGenerator):
    """1 for the right number, 0 for another or none."""

    async def reward(self, prompt: Prompt, sample: Sample) -> float:
        numbers = re.findall(r"-?\d+", sample.response)
        return float(bool(numbers) and Decimal(numbers[-1]) == int(prompt.label))


def run_rollout(data: dict[str, Any]) -> None:
    """Generate the prompts of the client."""
    ArithmeticGenerator(data).run()


def get_group_data_meta_info(groups: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Logged with the rollout: how often at least one response of a group was right."""
    solved = [any(item["reward"] == 1.0 for item in items) for items in groups.values()]
    return {"total_groups": len(groups), "solved_groups": sum(solved)}
