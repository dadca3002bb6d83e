"""SwanLab as a tracker; SWANLAB_MODE, SWANLAB_API_KEY, SWANLAB_WORKSPACE and SWANLAB_API_HOST are read by SwanLab.

The project is SWANLAB_PROJ_NAME (default: slime), the run's name that of the output directory; local files are in
SWANLAB_LOG_DIR (default: `<output_dir>/swanlog`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from slime.config.args import Args
from slime.observability.trackers import EvalSample, Step, TrackedRun, alarm_text, need_room, text_of


class SwanlabTracker:
    """One SwanLab run."""

    def __init__(self, args: Args) -> None:
        self._run: Any = None
        self.directory = ""

    def open(self, config: Mapping[str, Any], run: TrackedRun) -> str | None:
        """Begin the run, or go on with it.

        Raises:
            ImportError: swanlab is not installed.
        """
        import swanlab

        mode = os.environ.get("SWANLAB_MODE", "online")
        directory = os.environ.get("SWANLAB_LOG_DIR", str(run.directory / "swanlog"))
        os.makedirs(directory, exist_ok=True)
        need_room(directory)
        self.directory = directory
        known = run.known if mode == "online" else None  # without a server there is no run to go on with
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", "slime"),
            name=run.name,
            mode=mode,
            id=known,
            resume="allow" if known else None,
            reinit=True,
            log_dir=directory,
            # It would look ten times a second for what this process has printed, which is not the run's console.
            settings=swanlab.Settings(terminal=swanlab.Settings.Terminal(proxy_type="none")),
            config={key: _plain(value) for key, value in config.items()},
        )
        run.keep(str(self._run.id))
        return f"{mode}, {self._run.url if mode == 'online' else directory}"

    def log(self, metrics: Mapping[str, float], step: Step) -> None:
        """Write a record."""
        self._run.log({name: value for name, value in metrics.items() if name != step.key}, step=step.number)

    def log_samples(self, samples: Sequence[EvalSample], step: Step) -> None:
        """Write the answers of each data set as texts."""
        import swanlab

        texts: dict[str, list[Any]] = {}
        for sample in samples:
            text = f"{text_of(sample['prompt'])}\n\n{sample['response']}"
            shown = swanlab.Text(text, caption=f"reward {sample['reward']:g}")
            texts.setdefault(f"eval/{sample['data_set']}-samples", []).append(shown)
        self._run.log(texts, step=step.number)

    def log_alarm(self, alarm: Mapping[str, Any], step: Step) -> None:
        """Write an alarm as a text."""
        import swanlab

        self._run.log({"alarms": swanlab.Text(alarm_text(alarm), caption=str(alarm["what"]))}, step=step.number)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """End the run and send what is left."""
        self._run.finish(state="success" if summary["status"] == "finished" else "crashed")


def _plain(value: Any) -> Any:
    """A flag's value as SwanLab shows it."""
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value)
