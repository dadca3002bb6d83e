"""Weights & Biases as a tracker; wandb is imported on first use."""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from slime.config.args import Args
from slime.observability.trackers import EvalSample, Step, TrackedRun, alarm_text, need_room, text_of
from slime.utils.errors import UsageError
from slime.utils.http.api_keys import without_secrets

# For what is not uploaded yet at the end of a run (WANDB_FINISH_TIMEOUT is another); the rest stays on the disk
FINISH_S = 300.0
MARGIN_S = 30.0  # On top of that: W&B's own process, which keeps that deadline, may hang itself
SERVICE = "wandb-core"
ENDED_S = 10.0
# Family of metrics -> the metric that is its x axis.
STEP_METRICS = {
    "train": "train/step",
    "rollout": "rollout/step",
    "perf": "rollout/step",
    "multi_turn": "rollout/step",
    "agent": "rollout/step",
    "passrate": "rollout/step",
    "eval": "eval/step",
}


class WandbAdapter:
    """One W&B run; `args` decides mode, directory, project, names.

    It is the one that --wandb-run-id names, else, where a run goes on, the one that it had; else a new one.
    """

    def __init__(self, args: Args) -> None:
        self._args = args
        self.finish_s = upload_s() + ENDED_S + MARGIN_S  # the writer's deadline for `finish`
        self.run: Any = None
        self.directory = Path()
        self._with_axis: set[str] = set()
        self._train_steps = _train_steps(args) if args.wandb_always_use_train_step else None

    def open(self, config: Mapping[str, Any], run: TrackedRun) -> str | None:
        """Begin the W&B run, or go on with it.

        Raises:
            ImportError: wandb is not installed.
        """
        import wandb

        args = self._args
        mode = args.wandb_mode or os.environ.get("WANDB_MODE") or "online"
        directory = Path(args.wandb_dir or args.output_dir)
        directory.mkdir(parents=True, exist_ok=True)  # wandb falls back to a temporary directory when it is absent
        need_room(directory)
        self.directory = directory
        before = run.known if args.wandb_run_id is None else None
        run_id = args.wandb_run_id or before
        with _command_line(run.command_line):
            wandb.teardown()  # of a run that has failed; a service that has died is found by no new run
            if (args.wandb_key or args.wandb_host) and mode == "online":
                wandb.login(key=args.wandb_key, host=args.wandb_host)
            self.run = wandb.init(
                entity=args.wandb_team,
                project=args.wandb_project,
                group=args.wandb_group,
                name=None if before else run_name(args),  # it has one
                id=run_id,
                resume="allow" if run_id else None,
                dir=str(directory),
                mode=mode,
                config=dict(config),
                # The console that it would keep is this process's, not the driver's.
                settings={"finish_timeout": upload_s(), "finish_timeout_raises": True, "console": "off"},
            )
        run.keep(self.run.id)
        for step_metric in sorted(set(STEP_METRICS.values())):
            self.run.define_metric(step_metric)
        for family, step_metric in STEP_METRICS.items():
            self.run.define_metric(f"{family}/*", step_metric=step_metric)
        return str(self.run.url or self.run.settings.sync_dir)

    def log(self, metrics: Mapping[str, float], step: Step) -> None:
        """Write one record, with its step; --wandb-always-use-train-step gives it a train step, too."""
        data = dict(metrics)
        if self._train_steps is not None and step.key != "train/step":
            data["train/step"] = step.number * self._train_steps
        step_metric = next((name for name in STEP_METRICS.values() if name in data), None)
        for name in data.keys() - self._with_axis:
            if name.partition("/")[0] not in STEP_METRICS:  # a user's
                self.run.define_metric(name, step_metric=step_metric)
            self._with_axis.add(name)
        self.run.log(data)

    def log_samples(self, samples: Sequence[EvalSample], step: Step) -> None:
        """Write one table a data set."""
        import wandb

        columns = ["prompt", "response", "label", "reward", "truncated"]
        tables: dict[str, Any] = {}
        for sample in samples:
            name = f"eval/{sample['data_set']}-samples"
            if name not in tables:
                tables[name] = wandb.Table(columns=columns)
            row = (text_of(sample["prompt"]), sample["response"], str(sample["label"]))
            tables[name].add_data(*row, sample["reward"], sample["truncated"])
        self.run.log({**tables, "eval/step": step.number})

    def log_alarm(self, alarm: Mapping[str, Any], step: Step) -> None:
        """Send an alert, which W&B shows on the run's page and sends on as its user has set it."""
        self.run.alert(title=str(alarm["what"]), text=alarm_text(alarm))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Upload what is left and end the run, within a deadline.

        Raises:
            TimeoutError: not all of it was uploaded; the error names the line that uploads the rest.
        """
        self.run.summary.update({f"slime/{name}": value for name, value in summary.items()})
        watch = threading.Timer(upload_s() + MARGIN_S, _end_service)
        watch.daemon = True
        watch.start()
        directory = self.run.settings.sync_dir
        try:
            self.run.finish(exit_code=0 if summary["status"] == "finished" else 1)
        except Exception as error:
            raise TimeoutError(
                f"not all was uploaded ({type(error).__name__}: {error}); the rest is in {directory}. To upload it: "
                f"wandb sync {directory}"
            ) from error
        finally:
            watch.cancel()


def _train_steps(args: Args) -> int:
    """Train steps of a rollout."""
    return max(args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size, 1) * args.ppo_epochs


def upload_s() -> float:
    """Return the seconds that W&B has for its uploads when a run ends.

    Raises:
        UsageError: WANDB_FINISH_TIMEOUT is no number of them.
    """
    given = os.environ.get("WANDB_FINISH_TIMEOUT") or str(FINISH_S)
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"WANDB_FINISH_TIMEOUT={given}: give the seconds that W&B has for its uploads, or unset it")
    return seconds


def _end_service() -> None:
    """Kill W&B's process, which this one would wait for at its exit, without a deadline."""
    for child in psutil.Process().children():
        try:
            if child.name() == SERVICE:
                child.kill()
        except psutil.NoSuchProcess:
            continue  # it has ended


def run_name(args: Args) -> str | None:
    """`<group>-<random>`, so that runs of a group differ; the bare group with `--disable-wandb-random-suffix`."""
    if not args.wandb_group or not args.wandb_random_suffix:
        return args.wandb_group
    return f"{args.wandb_group}-{secrets.token_hex(3)}"


def public_config(args: Args) -> dict[str, Any]:
    """Every flag, secret ones hidden; values that are no plain data become their text."""
    plain = (str, int, float, bool, type(None), list, tuple, dict)
    return without_secrets(
        {
            name: value if isinstance(value, plain) else str(value)
            for name, value in sorted(vars(args).items())
            if not name.startswith("_")
        }
    )


@contextmanager
def _command_line(words: Sequence[str]) -> Iterator[None]:
    """Show W&B (0.31) the driver's command line: it uploads sys.argv, and no setting of it leaves that alone out."""
    own = sys.argv
    sys.argv = list(words) or own
    try:
        yield
    finally:
        sys.argv = own
