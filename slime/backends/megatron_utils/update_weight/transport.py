"""What a weight sync asks of a way to carry buckets: make one ready, then hand it to the engines.

It does not know which buckets there are, nor what becomes of an engine that refuses one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from slime.backends.megatron_utils.update_weight.engines import Calls

Bucket = list[tuple[str, torch.Tensor]]
"""(HF name, full tensor); views of live parameters as a rule."""


def _nothing() -> None:
    pass


@dataclass
class Posted:
    """A bucket that was handed to engines.

    Attributes:
        calls: to each engine; their results are the versions that the engines have now.
        finish: to be called once every engine has answered.
    """

    calls: Calls = field(default_factory=dict)
    finish: Callable[[], None] = _nothing


class Transport(ABC):
    """Carries buckets to some of the engines. All ranks have it and call `prepare`; the source rank calls `post`.

    Attributes:
        num_slots: buckets that may be on their way at once; each slot is used again only when every engine has
            answered for the bucket that was in it.
        shares_memory: engines read what other ranks than the source have prepared, so that these, too, must know
            when a slot is free.
        keeps_order: a bucket that one engine has not taken leaves it out of step, until the way is opened anew.
    """

    num_slots = 1
    shares_memory = False
    keeps_order = False

    @abstractmethod
    def prepare(self, bucket: Bucket, *, slot: int) -> Any:
        """Make a bucket ready (collective); it must not depend on `bucket` afterwards."""

    @abstractmethod
    def post(self, prepared: Any, *, version: str) -> Posted:
        """Begin handing it over, as this version of the engines' weights (source rank only)."""

    def timings(self) -> str:
        """For the log, what a device did since this was last asked; of most transports nothing is known."""
        return ""

    def close(self) -> None:  # noqa: B027
        """Give the way up; another one is opened in its place."""

    def release(self) -> None:  # noqa: B027 - most have nothing to give up
        """Give up what is needed only during a sync."""
