"""How weights get from the trainer to the engines: a row a way, read by rules of flags, the plan and the trainer."""

from __future__ import annotations

from dataclasses import dataclass

_UPDATERS = "slime.backends.megatron_utils.update_weight"


@dataclass(frozen=True)
class WeightTransport:
    """A way.

    Attributes:
        updater: dotted path of the class that sends them.
        is_over_files: each version is written to --update-weight-disk-dir, and engines read it there.
        sends_changes: after the first sync a version holds only the bytes that changed.
    """

    updater: str
    is_over_files: bool = False
    sends_changes: bool = False

    @property
    def versions_are_whole(self) -> bool:
        """Whether a version is all that an engine needs, whenever it reads it and whatever it held before."""
        return self.is_over_files and not self.sends_changes


MEMORY = WeightTransport(f"{_UPDATERS}.from_tensor.TensorWeightUpdater")
COLLECTIVE = WeightTransport(f"{_UPDATERS}.from_distributed.DistributedWeightUpdater")
FILES = WeightTransport(f"{_UPDATERS}.from_disk.DiskWeightUpdater", is_over_files=True)
DELTAS = WeightTransport(f"{_UPDATERS}.from_disk.DeltaWeightUpdater", is_over_files=True, sends_changes=True)

REFUSED = WeightTransport("", sends_changes=True)
"""A rule of flags says that only files can hold changed bytes."""

WAYS = {
    ("nccl", False): (COLLECTIVE, MEMORY),
    ("nccl", True): (REFUSED, REFUSED),
    ("disk", False): (FILES, FILES),
    ("disk", True): (DELTAS, DELTAS),
}
"""(--update-weight-transport, only changes) -> the way to engines in slots of their own, and in the trainer's."""


def transport_of(transport: str, mode: str, *, colocated: bool = False) -> WeightTransport:
    """Return the way of a run.

    Args:
        transport: --update-weight-transport.
        mode: --update-weight-mode.
        colocated: trainer and engines share their slots, so that memory can be handed over; files do not care.
    """
    return WAYS[transport, mode == "delta"][colocated]
