"""Opens a handle of `weight_transfer.serialize_flat` in another process, as an engine does, to see whether it can.

Run as a script it is that process. It does not know what becomes of a refusal.
"""

from __future__ import annotations

import os
import subprocess
import sys

NUM_BYTES = 2 * 1024**2
EXPECTED = 7
"""What each byte of the memory has to be."""
DEADLINE_S = 120.0


def opened_elsewhere(handle: str) -> str | None:
    """Open a handle to `NUM_BYTES` of `EXPECTED` in another process; returns why that did not work, or None."""
    # The saver of GPU memory is not for this process; nothing of it is to be given up.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD" and not name.startswith("TMS_")}
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, input=handle, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return f"another process did not open the memory within {DEADLINE_S:.0f} s"
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {done.returncode}"


def main() -> None:
    """Open the handle on standard input and read its memory."""
    from slime.backends.sglang_utils.weight_transfer import open_flat

    data = open_flat(sys.stdin.read().strip())
    if data.numel() != NUM_BYTES or not bool((data == EXPECTED).all()):
        raise SystemExit("the memory that was opened holds something else")


if __name__ == "__main__":
    main()
