"""The script through which SGLang starts a scheduler on a NUMA node, written where only this user can write.

Upstream (0.5.x) writes it to /tmp with mode 0777 and executes it a moment later: whoever rewrites it meanwhile runs
code as the user of the engine. It does not know which nodes there are.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import tempfile


def install() -> None:
    """Replace SGLang's writer of that script."""
    from sglang.srt.utils import numa_utils

    numa_utils._create_numactl_executable = write_script


def write_script(numactl_args: str) -> tuple[str, str]:
    """Write the script to the temporary directory, for this user alone.

    Returns:
        its path, and a text for SGLang's log.
    """
    python = os.fsdecode(multiprocessing.spawn.get_executable() or "")
    script = f'#!/bin/sh\nexec numactl {numactl_args} {python} "$@"'
    descriptor, path = tempfile.mkstemp(prefix="slime-numactl-", suffix=".sh")
    with os.fdopen(descriptor, "w") as file:
        file.write(script)
        os.fchmod(file.fileno(), 0o700)
    return path, f"script={script!r}"
