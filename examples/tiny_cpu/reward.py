"""The reward of the quick start: 1 when the response is exactly the label, else 0.

    --custom-rm-path examples.tiny_cpu.reward:exact_match

It knows nothing of addition. A reward function gets the run's flags and one finished `Sample`.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.utils.types import Sample

END_OF_TURN = "<|im_end|>"


async def exact_match(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """1.0 when the response ended by itself and its text is the label, else 0.0."""
    if sample.status != Sample.Status.COMPLETED:
        return 0.0
    return float(sample.response.removesuffix(END_OF_TURN).strip() == sample.label)
