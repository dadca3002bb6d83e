"""The reward of the calculator example: 1 when the model's last message is the label, however it came to it.

    --custom-rm-path examples.multi_turn_calculator.reward:right_answer

Calling the tool earns nothing by itself. `sample.response` also holds tool calls and what the tool said, hence
`final_answer`.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.rollout.multi_turn import final_answer
from slime.utils.types import Sample


async def right_answer(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """1.0 when the conversation ended with the right number, else 0.0."""
    return float(final_answer(sample) == sample.label)
