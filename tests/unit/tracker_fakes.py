"""The writer of trackers in the test's own process, and trackers of one's own that fail in some way."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.observability.trackers import client, writer


class WriterHere:
    """In the place of `TrackerWriter`: the code of the process, run by the test's one at the end of the run.

    The files that a run writes are all that the two processes share, so a test sees the same as of a run.
    """

    def __init__(self, args: Any, names: Sequence[str]) -> None:
        self._directory = Path(args.output_dir)
        client.prepare(args, names)

    def finish(self, *, failed: bool = False) -> None:
        """Deliver everything."""
        ending, said = writer.Ending(), []
        ending.begin(20.0, {"status": "failed" if failed else "finished"})
        writer.serve(self._directory, lambda kind, text: said.append((kind, text)), ending)
        assert not [text for kind, text in said if kind == "warning"], said


class LinesTracker:
    """Appends what it is given to `<output_dir>/got.jsonl`, a line a call."""

    def __init__(self, args: Any) -> None:
        self._path = Path(args.output_dir) / "got.jsonl"

    def _add(self, *what: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def open(self, config: dict[str, Any], run: Any) -> str:
        self._add("open", run.known, config.get("rollout_batch_size"))
        run.keep(run.known or "made up")
        return str(self._path)

    def log(self, metrics: dict[str, float], step: Any) -> None:
        self._add("log", step.key, step.number, metrics)

    def log_samples(self, samples: list[dict[str, Any]], step: Any) -> None:
        self._add("samples", step.number, samples)

    def log_alarm(self, alarm: dict[str, Any], step: Any) -> None:
        self._add("alarm", step.number, alarm)

    def finish(self, summary: dict[str, Any]) -> None:
        self._add("finish", summary["status"])


class Wounded(LinesTracker):
    """Fails as the class attributes say."""

    hangs_at: int | None = None
    refuses: int | None = None
    is_down = False

    def log(self, metrics: dict[str, float], step: Any) -> None:
        if type(self).is_down:
            raise ConnectionError("nobody listens")
        if step.number == type(self).refuses:
            raise ValueError("a metric has no such name")
        if step.number == type(self).hangs_at:
            type(self).hangs_at = None
            time.sleep(5)
            return
        super().log(metrics, step)


def got(directory: Path) -> list[list[Any]]:
    """The calls that a tracker has had."""
    path = directory / "got.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
