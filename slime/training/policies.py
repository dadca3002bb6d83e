"""Several policies over one base in one trainer (--lora-policies): whose turn it is in the model.

The model has room for one set of adapters, and the optimizer for the state of one. Those of the policies whose turn it
is not lie in host memory, and all that a train step depends on is swapped: adapters, moments, learning rate, schedule
and random states. So a policy is trained as in a run of its own.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime.config.args import Args
from slime.config.lora_policies import FLAG, LoraPolicy, policies_of
from slime.training.backend import Backend, CheckpointSource
from slime.utils.accelerator.tensor_backper import TensorBackuper
from slime.utils.errors import UsageError

logger = logging.getLogger(__name__)
MetricRecord = tuple[dict[str, float], str]
PART = "policies"
"""Of an iteration: the checkpoint root of each policy."""


class Policies:
    """The policies of a run; every rank calls every method.

    Args:
        args: the run's flags.
        backend: has built the model and loaded the base.
    """

    def __init__(self, args: Args, backend: Backend) -> None:
        self._policies = policies_of(args)
        self._backend = backend
        self._states = TensorBackuper(backend.state_tensors)
        self._weights = TensorBackuper(backend.named_weights)
        self._values: dict[str, dict[str, Any]] = {}
        self._live: LoraPolicy | None = None

    def begin(self, directory: Path | None, start: CheckpointSource, iteration: int | None) -> None:
        """Begin every policy, or go on with it.

        Args:
            directory: the iteration that the run goes on from; None where it begins.
            start: what of it to load.
            iteration: its number.

        Raises:
            UsageError: it was written by a run of one policy.
        """
        if directory is not None and not (directory / PART).is_dir():
            raise UsageError(
                f"--load {start.path} was written by a run without {FLAG}; begin anew with another --save and --load, "
                "or leave the flag out."
            )
        for policy in self._policies:
            self._backend.be_policy(policy, anew=True)
            root = None if directory is None else directory / PART / policy.name
            if root is not None and root.is_dir():
                source = replace(start, path=str(root), step=iteration, is_start=False, over_base=True)
                self._backend.load(source)
                self._backend.be_policy(policy, anew=False)
            elif root is not None:
                logger.warning("%s: %s has no policy %s, which begins anew", FLAG, directory, policy.name)
            self._live = policy
            self._keep()
        self._take_turn(self._policies[0])

    def turns(self) -> Iterator[LoraPolicy]:
        """Let the model hold each policy in turn, then the first again; what is trained in its turn is kept."""
        for policy in self._policies:
            self._take_turn(policy)
            yield policy
        self._take_turn(self._policies[0])

    def adapters(self) -> Iterator[LoraPolicy]:
        """Let the model hold the weights of each policy in turn, to be read."""
        self._keep()
        try:
            for policy in self._policies:
                self._show(policy)
                yield policy
        finally:  # also after a failure between two: what is kept next must be the first's own
            self._show(self._policies[0])

    def _show(self, policy: LoraPolicy) -> None:
        self._weights.restore(policy.name)
        self._backend.be_policy(policy, anew=False)

    def _take_turn(self, policy: LoraPolicy) -> None:
        if policy is self._live:
            return
        self._keep()
        self._states.restore(policy.name)
        self._backend.be_policy(policy, anew=False)
        self._backend.restore_values(self._values[policy.name])
        self._live = policy

    def _keep(self) -> None:
        assert self._live is not None, "`begin` comes first"
        self._states.backup(self._live.name)
        self._weights.backup(self._live.name)
        self._values[self._live.name] = self._backend.state_values()


def named_after(policy: LoraPolicy, records: Sequence[MetricRecord]) -> list[MetricRecord]:
    """Metric records of a policy's turn under names that say whose they are.

    >>> named_after(LoraPolicy(name="math"), [({"train/loss": 0.5, "train/step": 3}, "train/step")])
    [({'policy/math/train/loss': 0.5, 'train/step': 3}, 'train/step')]
    """
    return [
        ({name if name == step else f"policy/{policy.name}/{name}": value for name, value in metrics.items()}, step)
        for metrics, step in records
    ]


def over_policies(per_policy: Sequence[Sequence[MetricRecord]]) -> list[MetricRecord]:
    """Means over all policies, under the names of a run of one: of what every policy has.

    >>> over_policies([[({"train/loss": 1.0, "train/step": 3}, "train/step")], [({"train/loss": 2.0}, "train/step")]])
    [({'train/loss': 1.5}, 'train/step')]
    """
    found = []
    for of_all in zip(*per_policy, strict=True):
        common = [name for name in of_all[0][0] if all(name in metrics for metrics, _ in of_all)]
        means = {name: statistics.fmean(metrics[name] for metrics, _ in of_all) for name in common}
        found.append((means, of_all[0][1]))
    return found
