"""How weights get from the trainer to the engines: a row a way, read by rules of flags, the plan and the trainer."""

from __future__ import annotations

from dataclasses import dataclass

from slime.plugins import Table
from slime.utils.misc import try_to_load

_UPDATERS = "slime.backends.megatron_utils.update_weight"


@dataclass(frozen=True)
class WeightTransport:
    """A way.

    Attributes:
        updater: path of the class that sends them (`slime.backends.megatron_utils.update_weight.WeightUpdater`).
        is_over_files: each version is written to --update-weight-disk-dir, and engines read it there.
        sends_changes: after the first sync a version holds only the bytes that changed.
        colocated: the way to engines in the trainer's slots, where that is another.
        changes: the way with --update-weight-mode delta; None where there is none.
        title: what the plan calls it; slime's own ways it knows.
    """

    updater: str
    is_over_files: bool = False
    sends_changes: bool = False
    colocated: WeightTransport | None = None
    changes: WeightTransport | None = None
    title: str = ""

    @property
    def versions_are_whole(self) -> bool:
        """Whether a version is all that an engine needs, whenever it reads it and whatever it held before."""
        return self.is_over_files and not self.sends_changes


MEMORY = WeightTransport(f"{_UPDATERS}.from_tensor.TensorWeightUpdater")
COLLECTIVE = WeightTransport(f"{_UPDATERS}.from_distributed.DistributedWeightUpdater", colocated=MEMORY)
DELTAS = WeightTransport(f"{_UPDATERS}.from_disk.DeltaWeightUpdater", is_over_files=True, sends_changes=True)
FILES = WeightTransport(f"{_UPDATERS}.from_disk.DiskWeightUpdater", is_over_files=True, changes=DELTAS)
ADAPTERS = WeightTransport(f"{_UPDATERS}.from_adapters.AdapterUpdater")
"""With --lora-serve adapter, whichever way the flags name: memory or files."""

REFUSED = WeightTransport("", sends_changes=True)
"""A rule of flags says that only files can hold changed bytes."""


def _updater_problem(name: str, row: WeightTransport) -> str | None:
    problem = try_to_load(row.updater)[1]
    return f"has an updater that cannot be used{problem}" if problem else None


TRANSPORTS: Table[WeightTransport] = Table(
    "slime.transports", WeightTransport, {"nccl": COLLECTIVE, "disk": FILES}, check=_updater_problem
)
"""--update-weight-transport -> the way of whole versions."""


def transport_of(transport: str, mode: str, *, colocated: bool = False) -> WeightTransport:
    """Return the way of a run.

    Args:
        transport: --update-weight-transport.
        mode: --update-weight-mode.
        colocated: trainer and engines share their slots, so that memory can be handed over; files do not care.
    """
    way = TRANSPORTS[transport]
    if mode == "delta":
        return way.changes or REFUSED
    return way.colocated if colocated and way.colocated else way
