"""trackio as a tracker; TRACKIO_DIR, TRACKIO_SERVER_URL and TRACKIO_SPACE_ID are read by trackio itself.

The project is TRACKIO_PROJECT (default: slime), the run's name that of the output directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.config.args import Args
from slime.observability.trackers import EvalSample, Step, TrackedRun, alarm_text, need_room, text_of


class TrackioTracker:
    """One trackio run, on this host unless a server or a Space is set."""

    def __init__(self, args: Args) -> None:
        self._run: Any = None
        self.directory = Path()

    def open(self, config: Mapping[str, Any], run: TrackedRun) -> str | None:
        """Begin the run, or go on with it.

        Raises:
            ImportError: trackio is not installed.
        """
        import trackio
        from trackio.utils import TRACKIO_DIR

        TRACKIO_DIR.mkdir(parents=True, exist_ok=True)
        need_room(TRACKIO_DIR)
        self.directory = TRACKIO_DIR
        project, name = os.environ.get("TRACKIO_PROJECT", "slime"), run.known or run.name
        self._run = trackio.init(
            project=project,
            name=name,
            config={key: value for key, value in config.items() if not key.startswith("_")},
            resume="allow" if run.known else "never",
            embed=False,
            auto_log_gpu=False,  # the run has these metrics, of every node
            auto_log_cpu=False,
        )
        run.keep(self._run.name)
        return f"trackio show --project {project}"

    def log(self, metrics: Mapping[str, float], step: Step) -> None:
        """Write a record."""
        self._run.log(dict(metrics), step=step.number)

    def log_samples(self, samples: Sequence[EvalSample], step: Step) -> None:
        """Write a table of the answers."""
        import trackio

        columns = ["data_set", "prompt", "response", "label", "reward", "truncated"]
        rows = [
            [s["data_set"], text_of(s["prompt"]), s["response"], str(s["label"]), s["reward"], s["truncated"]]
            for s in samples
        ]
        self._run.log({"eval/samples": trackio.Table(columns=columns, data=rows)}, step=step.number)

    def log_alarm(self, alarm: Mapping[str, Any], step: Step) -> None:
        """Send an alert."""
        self._run.alert(title=str(alarm["what"]), text=alarm_text(alarm))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Wait until everything is written."""
        self._run.finish()
