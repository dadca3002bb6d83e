"""TensorBoard as a tracker; tensorboard is imported on first use."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.config.args import Args
from slime.observability.trackers import EvalSample, Step, TrackedRun, alarm_text, text_of
from slime.utils.errors import UsageError


class _TensorboardAdapter:
    """Writes scalars under `<tb_project_name>/<tb_experiment_name>`, or under `$TENSORBOARD_DIR`.

    A run that goes on writes where it did before, whatever the time says (the default of the experiment's name).
    """

    def __init__(self, args: Args) -> None:
        self._args = args
        self._writer: Any = None
        self.directory = Path()

    def open(self, config: Mapping[str, Any], run: TrackedRun) -> str | None:
        """Begin an event file.

        Raises:
            ImportError: tensorboard is not installed.
        """
        from torch.utils.tensorboard import FileWriter

        directory = tensorboard_dir(self._args)
        if run.known and self._args.tb_experiment_name is None and Path(run.known).parent == directory.parent:
            directory = Path(run.known)
        self._writer, self.directory = FileWriter(str(directory)), directory
        run.keep(str(directory))
        return str(directory)

    def log(self, metrics: Mapping[str, float], step: Step) -> None:
        """Write each value of a record, but its step, at that step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items() if name != step.key]
        self._writer.add_summary(Summary(value=values), step.number, walltime=step.time_s)  # one event
        self._writer.flush()

    def log_samples(self, samples: Sequence[EvalSample], step: Step) -> None:
        """Write each answer as a text of its own."""
        for number, sample in enumerate(samples):
            text = f"{text_of(sample['prompt'])}\n\n{sample['response']}\n\nreward {sample['reward']:g}"
            self._add_text(f"eval/{sample['data_set']}/samples/{number}", text, step)

    def log_alarm(self, alarm: Mapping[str, Any], step: Step) -> None:
        """Write an alarm as a text."""
        self._add_text("alarms", alarm_text(alarm), step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the event file."""
        self._writer.close()

    def _add_text(self, name: str, text: str, step: Step) -> None:
        from torch.utils.tensorboard import summary

        # Four spaces make it code: TensorBoard would take markdown and HTML in it for formatting.
        code = "\n".join(f"    {line}" for line in text.splitlines())
        self._writer.add_summary(summary.text(name, code), step.number)
        self._writer.flush()


def tensorboard_dir(args: Args) -> Path:
    """Where the event files go: --tb-project-name wins over the environment, whose directory is that of one run."""
    root = args.tb_project_name or os.environ.get("TENSORBOARD_DIR")
    if not root:
        raise UsageError("--use-tensorboard needs --tb-project-name, or the environment variable TENSORBOARD_DIR")
    if args.tb_project_name or args.tb_experiment_name:
        return Path(root) / (args.tb_experiment_name or time.strftime("%Y%m%d-%H%M%S"))
    return Path(root)
