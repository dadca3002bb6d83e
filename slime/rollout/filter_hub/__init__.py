"""Dynamic filters, which decide what finished groups a rollout keeps: their answer, and how a rollout reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class DynamicFilterOutput:
    """A filter's verdict on one group.

    `reason` names the metric of a dropped group (rollout/dynamic_filter/drop_<reason>). `keep_when_insufficient` keeps
    a group all the same when dropping it would leave too few in flight for a full batch.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Call a filter; no filter keeps everything, and a filter may return a plain bool.

    Raises:
        TypeError: it returned None (more likely a forgotten `return` than a wish to drop everything) or a list.
    """
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn(*args, **kwargs)
    if isinstance(output, DynamicFilterOutput):
        return output
    if output is None or not hasattr(output, "__bool__"):  # NumPy's and torch's truth values are fine
        found = "None" if output is None else f"a {type(output).__name__}"
        raise TypeError(f"it returned {found}; a filter must return a DynamicFilterOutput or a bool")
    return DynamicFilterOutput(keep=bool(output))


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Whether the group goes.

    Args:
        output: the filter's verdict.
        remaining_batch_size: groups accepted or still in flight, this one included.
        target_data_size: groups that the rollout needs.
    """
    if output.keep:
        return False
    is_needed = remaining_batch_size <= target_data_size
    return not (output.keep_when_insufficient and is_needed)


class MetricGatherer:
    """Counts dropped groups by reason."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()

    @property
    def num_dropped(self) -> int:
        """Groups dropped so far."""
        return self._dropped.total()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count one dropped group."""
        self._dropped[reason or "unnamed"] += 1

    def collect(self) -> dict[str, int]:
        """rollout/dynamic_filter/drop_<reason> -> count."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._dropped.items()}
