"""List what another user of this machine can read or write of a run that is going on; started as root."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from slime.processes.registry import MARK, processes_of, shared_memory_of

NOBODY = 65534


def main(folder: Path) -> None:
    """Print as JSON the paths below `folder`, and of the run's shared memory, that user can read, and write."""
    memory = shared_memory_of((process.pid for process in processes_of(os.environ[MARK])), since=0.0)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    paths = [*memory, *(Path(where, name) for where, dirs, files in os.walk(folder) for name in dirs + files)]
    kinds = {"read": os.R_OK, "write": os.W_OK}
    found = {kind: [str(path) for path in paths if os.access(path, flag)] for kind, flag in kinds.items()}
    print(json.dumps(found | {"memory": sorted(map(str, memory))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
