"""How weights get from the trainer to the engines: a row a way, read by rules of flags, the plan and the trainer.

And the directory of --update-weight-disk-dir: names of versions, which run owns it, what an earlier one left there. A
run holds a lock on a file in it for as long as it lives; the file says whose it is. Importing it needs no torch.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from slime.plugins import Table
from slime.utils.errors import UsageError
from slime.utils.misc import try_to_load

logger = logging.getLogger(__name__)

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


OWNER_FILE = ".slime_weight_sync.json"
VERSIONS = "weight_v[0-9]*"
FLAG = "--update-weight-disk-dir"
GONE_AFTER_S = 30.0


def why_not_ours(root: str | Path) -> str | None:
    """Why a run that begins now cannot have this directory; None when it can. Leaves nothing behind."""
    path = Path(root) / OWNER_FILE
    if not path.exists():
        return _kept_versions(Path(root), {})
    with path.open("r+") as file:
        if not _lock(file):
            return _in_use(Path(root), _read(file))
        return _kept_versions(Path(root), _read(file))


class WeightDir:
    """The directory, for the process that writes versions.

    Args:
        root: made if it does not exist.
        keeps_files: versions stay when the engines have them.
        run: what identifies the run to a person, such as its output directory.

    Attributes:
        run_id: of the run that has the directory, whichever of its processes writes there.
    """

    def __init__(self, root: Path, *, keeps_files: bool, run: str) -> None:
        self.root = root
        self.keeps_files = keeps_files
        self._run = run
        self.run_id = uuid.uuid4().hex
        self.file: IO[str] | None = None

    def claim(self, *, goes_on: bool = False) -> None:
        """Take the directory until this process ends, and remove what an earlier run would have removed, too.

        Args:
            goes_on: an earlier process of this very run may have had it, and not be quite gone; its versions stay.

        Raises:
            UsageError: another run has it, or an earlier one kept versions there.
        """
        if self.file is not None:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        file = (self.root / OWNER_FILE).open("a+")
        deadline = time.monotonic() + (GONE_AFTER_S if goes_on else 0.0)
        while not _lock(file):
            if time.monotonic() >= deadline:
                raise UsageError(f"{FLAG} {self.root} {_in_use(self.root, _read(file))}")
            time.sleep(0.1)
        earlier = _read(file)
        if goes_on and earlier.get("run") == self._run:
            self.run_id = str(earlier.get("id") or self.run_id)
        else:  # the first time that this run needs it may be long after its start
            self._take_over(earlier)
        mine = {"run": self._run, "id": self.run_id, "host": socket.gethostname(), "pid": os.getpid()}
        mine |= {"keeps_files": self.keeps_files}
        file.truncate(0)
        file.write(json.dumps(mine))
        file.flush()
        self.file = file  # closing it would give the lock up

    def _take_over(self, earlier: dict[str, Any]) -> None:
        """Keep what an earlier run kept, and remove what it left."""
        if problem := _kept_versions(self.root, earlier):
            raise UsageError(f"{FLAG} {self.root} {problem}")
        for left in self.root.glob(VERSIONS):
            logger.warning("removing %s, which an earlier run left behind", left)
            shutil.rmtree(left)

    def path(self, version: int) -> Path:
        """Where a version lies: `<root>/weight_v000012`."""
        return self.root / f"weight_v{version:06d}"

    def discard(self, version: int) -> None:
        """Remove a version that every engine has, unless versions are kept."""
        if self.keeps_files:
            return
        try:
            shutil.rmtree(self.path(version))
        except OSError as error:
            logger.warning("%s is not needed any more, but cannot be removed: %s", self.path(version), error)

    @staticmethod
    def remove(path: Path) -> None:
        """Remove what a failed attempt may have left.

        Raises:
            OSError: it cannot be removed.
        """
        if path.exists():
            shutil.rmtree(path)


def _lock(file: IO[str]) -> bool:
    """Whether the file is this process's now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("%s has no locks (%s): nothing keeps two runs from using it", file.name, error)
    return True


def _read(file: IO[str]) -> dict[str, Any]:
    file.seek(0)
    try:
        found = json.loads(file.read())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _in_use(root: Path, owner: dict[str, Any]) -> str:
    who = f"{owner.get('run')} (process {owner.get('pid')} on {owner.get('host')})" if owner else "another run"
    return f"is in use by {who}; give each run a directory of its own."


def _kept_versions(root: Path, owner: dict[str, Any]) -> str | None:
    """What an earlier run kept on purpose is not overwritten; None where there is nothing."""
    kept = [] if owner.get("keeps_files") is False else sorted(root.glob(VERSIONS))
    if not kept:
        return None
    return f"holds {kept[0].name} of an earlier run; remove that run's versions, or give another directory."
