"""TensorBoard as a sink of metric records; tensorboard is imported on first use."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.config.args import Args
from slime.observability.trackers import TENSORBOARD_DIR, EvalSample, TrackerRuns, text_of
from slime.utils.errors import UsageError, line_of_full_disk

logger = logging.getLogger(__name__)


class _TensorboardAdapter:
    """Writes scalars under `<tb_project_name>/<tb_experiment_name>`, or under `$TENSORBOARD_DIR`.

    A run that goes on writes where it did before, whatever the time says (the default of the experiment's name).

    Raises:
        UsageError: neither the variable nor `--tb-project-name` is given, or tensorboard is not installed.
    """

    def __init__(self, args: Args, runs: TrackerRuns) -> None:
        directory = tensorboard_dir(args)
        before = runs.known(TENSORBOARD_DIR)
        if before is not None and args.tb_experiment_name is None and Path(before).parent == directory.parent:
            directory = Path(before)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                "--use-tensorboard needs the package tensorboard, which is not installed: pip install tensorboard"
            ) from error
        self._directory = directory
        self._writer: Any = SummaryWriter(log_dir=str(directory))
        runs.keep(TENSORBOARD_DIR, str(directory))

    def write(self, metrics: Mapping[str, float], step_key: str) -> None:
        """Write each value of a record, but its step, at that step."""

        def write(writer: Any) -> None:
            for name, value in metrics.items():
                if name != step_key:
                    writer.add_scalar(name, value, int(metrics[step_key]))
            writer.flush()

        self._unless_full(write)

    def write_eval_samples(self, shown: Sequence[EvalSample], step: int) -> None:
        """Write each answer as a text of its own."""

        def write(writer: Any) -> None:
            for number, sample in enumerate(shown):
                text = f"{text_of(sample['prompt'])}\n\n{sample['response']}\n\nreward {sample['reward']:g}"
                # Four spaces make it code: TensorBoard would take markdown and HTML in it for formatting.
                code = "\n".join(f"    {line}" for line in text.splitlines())
                writer.add_text(f"eval/{sample['data_set']}/samples/{number}", code, step)
            writer.flush()

        self._unless_full(write)

    def write_alarm(self, alarm: Mapping[str, Any]) -> None:
        """TensorBoard has no alarms."""

    def finish(self) -> None:
        """Close the event file."""
        self._unless_full(lambda writer: writer.close())

    def _unless_full(self, write: Callable[[Any], None]) -> None:
        """Write, until the disk is full: the thread that writes TensorBoard's file has ended then, for good."""
        if self._writer is None:
            return
        try:
            write(self._writer)
        except OSError as error:
            if (problem := line_of_full_disk(error)) is None:
                raise
            logger.error("%s gets no more events (%s); the run goes on without them", self._directory, problem)
            self._writer = None


def tensorboard_dir(args: Args) -> Path:
    """Where the event files go: --tb-project-name wins over the environment, whose directory is that of one run."""
    root = args.tb_project_name or os.environ.get("TENSORBOARD_DIR")
    if not root:
        raise UsageError("--use-tensorboard needs --tb-project-name, or the environment variable TENSORBOARD_DIR")
    if args.tb_project_name or args.tb_experiment_name:
        return Path(root) / (args.tb_experiment_name or time.strftime("%Y%m%d-%H%M%S"))
    return Path(root)
