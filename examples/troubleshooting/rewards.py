"""Rewards with a fault each: what a run looks like with them is in docs/troubleshooting.md."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

from slime.utils.types import Sample

END_OF_TURN = "<|im_end|>"


async def sevens(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Return 1.0 for the one response "7": the easiest way to it is to stop exploring."""
    return float(sample.response.removesuffix(END_OF_TURN).strip() == "7")


async def long(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Return the share of the allowed length that was used: a reward that likes long responses, right or wrong."""
    return sample.response_length / args.rollout_max_response_len


async def blocking(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Return 1.0 for the right sum, after 20 ms in which no other sample can be scored."""
    time.sleep(0.02)
    return float(sample.response.removesuffix(END_OF_TURN).strip() == sample.label)
