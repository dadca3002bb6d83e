"""A reward for arithmetic answered in free text: is the last number of the response the label.

    --custom-rm-path examples.reasoning_gym.reward:last_number

A small pretrained model hardly ever writes a box by itself, so the built-in `math` would give it nothing to learn
from.
"""

from __future__ import annotations

import re
from argparse import Namespace
from typing import Any

from slime.utils.types import Sample

NUMBER = re.compile(r"(?<![\d.])-?\d[\d,]*(?:\.\d+)?")


async def last_number(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """1.0 when the last number in the response equals the label as a number, else 0.0."""
    numbers = NUMBER.findall(sample.response)
    if not numbers or sample.label is None:
        return 0.0
    return float(float(numbers[-1].replace(",", "")) == float(sample.label))
