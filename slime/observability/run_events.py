"""run_events.jsonl: what a run says of itself, for pages that are looked at while it runs and after it crashed.

One line an event, appended by the driver: "start" (command, flags, process), "plan" (the rollouts to do; again after a
restart), "begin" and "end" of each phase, and "finish" (how it ended).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.processes.directories import PRIVATE

FILE = "run_events.jsonl"


class RunEvents:
    """The events of one run.

    Args:
        directory: --output-dir.
    """

    def __init__(self, directory: Path) -> None:
        from slime.observability.logging_utils import AppendedLines  # readers of FILE need none of it

        directory.mkdir(parents=True, exist_ok=True)
        self._lines = AppendedLines(directory / FILE, mode=PRIVATE)

    def write(self, event: str, **values: Any) -> None:
        """Append an event; what is no JSON becomes its text."""
        self._lines.write(json.dumps({"event": event, "time": time.time(), **values}, default=str))

    def start(self, command: str, resume: str | None, flags: Mapping[str, Any]) -> None:
        """Say what is started.

        Args:
            command: as it was given, without secrets.
            resume: the command that goes on with the run; None where nothing of it is saved.
            flags: the parsed ones; the values of secret ones are hidden.
        """
        from slime.utils.http.api_keys import without_secrets  # likewise

        shown = without_secrets(flags)
        host, pid = socket.gethostname(), os.getpid()
        self.write("start", command=command, resume=resume, host=host, pid=pid, flags=shown)
