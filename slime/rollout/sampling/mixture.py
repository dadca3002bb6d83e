"""Draws prompts from several data sets, each as often as its weight says.

The order is no draw of lots: every prompt comes from the data set that is furthest behind its share, so that any
stretch of a run has the shares that were asked for, to a prompt or two. Each data set goes on epoch after epoch by
itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime.utils.data import Dataset
from slime.utils.eval_config import PromptSource
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


@dataclass
class _Place:
    """Where a data set's next prompt is, and how far it is behind its share, in prompts."""

    sample_offset: int = 0
    epoch_id: int = 0
    behind: float = 0.0


class Mixture:
    """The prompts of several data sets.

    Args:
        sources: settings and prompts of each.
        shuffles: every epoch of a data set has an order of its own.
    """

    def __init__(self, sources: Sequence[tuple[PromptSource, Dataset]], *, shuffles: bool) -> None:
        self._sources, self._shuffles = {source.name: (source, dataset) for source, dataset in sources}, shuffles
        self._places = {name: _Place() for name in self._sources}
        self._order_epochs()

    def __len__(self) -> int:
        return sum(len(dataset) for _, dataset in self._sources.values())

    def _order_epochs(self) -> None:
        for name, (_, dataset) in self._sources.items():
            if self._shuffles:
                dataset.shuffle(self._places[name].epoch_id)

    def draw(self, rollout_id: int) -> Sample:
        """The next prompt, by the weights of this rollout."""
        weights = {name: source.weight_at(rollout_id) for name, (source, _) in self._sources.items()}
        total = sum(weights.values())
        for name, weight in weights.items():
            self._places[name].behind += weight / total
        drawn = max((name for name, weight in weights.items() if weight), key=lambda name: self._places[name].behind)
        self._places[drawn].behind -= 1
        return self._sources[drawn][1].draw(self._places[drawn], shuffles=self._shuffles)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Name -> place of each data set: plain values."""
        return {name: vars(place).copy() for name, place in self._places.items()}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Go to the places that `state_dict` described; data sets that it has not begin anew, with one warning."""
        new = [name for name in self._places if name not in state]
        gone = [name for name in state if name not in self._places]
        if new or gone:
            logger.warning(
                "the saved state has other data sets: %s begin at their first prompt, %s are not drawn any more",
                *(", ".join(names) or "none" for names in (new, gone)),
            )
        self._places = {name: _Place(**state.get(name, {})) for name in self._places}
        self._order_epochs()
