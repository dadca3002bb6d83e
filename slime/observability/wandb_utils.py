"""Weights & Biases as a sink of metric records.

One process per run writes (the driver), so there is nothing shared to attach to. wandb is imported on first use.
"""

from __future__ import annotations

import logging
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
from slime.observability.trackers import WANDB_RUN, EvalSample, TrackerRuns, text_of
from slime.utils.errors import UsageError
from slime.utils.http.api_keys import command_line_without_secrets, without_secrets

logger = logging.getLogger(__name__)

# For what is not uploaded yet at the end of a run (WANDB_FINISH_TIMEOUT is another); the rest stays on the disk
FINISH_S = 300.0
ANSWER_MARGIN_S = 30.0  # On top of that: W&B's own process, which keeps that deadline, may hang itself
SERVICE = "wandb-core"
ENDED_S = 10.0
# Family of metrics -> the metric that is its x axis.
STEP_METRICS = {
    "train": "train/step",
    "rollout": "rollout/step",
    "perf": "rollout/step",
    "multi_turn": "rollout/step",
    "passrate": "rollout/step",
    "eval": "eval/step",
}


class WandbAdapter:
    """One W&B run; `args` decides mode, directory, project, names.

    It is the one that --wandb-run-id names, else, where a run goes on, the one that it had; else a new one.

    Raises:
        UsageError: wandb is not installed, or WANDB_FINISH_TIMEOUT is no number of seconds.
    """

    def __init__(self, args: Args, runs: TrackerRuns) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UsageError("--use-wandb needs the package wandb: pip install wandb") from error
        finish_s = _finish_s()
        mode = args.wandb_mode or os.environ.get("WANDB_MODE") or "online"
        directory = Path(args.wandb_dir or args.output_dir)
        directory.mkdir(parents=True, exist_ok=True)  # wandb falls back to a temporary directory when it is absent
        before = runs.known(WANDB_RUN) if args.wandb_run_id is None else None
        run_id = args.wandb_run_id or before
        with _public_command_line(args):
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
                config=public_config(args),
                settings={"finish_timeout": finish_s, "finish_timeout_raises": True},
            )
        runs.keep(WANDB_RUN, self.run.id)
        for step_metric in sorted(set(STEP_METRICS.values())):
            self.run.define_metric(step_metric)
        for family, step_metric in STEP_METRICS.items():
            self.run.define_metric(f"{family}/*", step_metric=step_metric)
        self._with_axis: set[str] = set()
        self._train_steps = _train_steps(args) if args.wandb_always_use_train_step else None

    def write(self, metrics: Mapping[str, float], step_key: str) -> None:
        """Write one record, with its step; --wandb-always-use-train-step gives it a train step, too."""
        data = dict(metrics)
        if self._train_steps is not None and step_key != "train/step":
            data["train/step"] = int(metrics[step_key]) * self._train_steps
        step_metric = next((name for name in STEP_METRICS.values() if name in data), None)
        for name in data.keys() - self._with_axis:
            if name.partition("/")[0] not in STEP_METRICS:  # a user's
                self.run.define_metric(name, step_metric=step_metric)
            self._with_axis.add(name)
        self.run.log(data)

    def write_eval_samples(self, shown: Sequence[EvalSample], step: int) -> None:
        """Write one table a data set."""
        import wandb

        columns = ["prompt", "response", "label", "reward", "truncated"]
        tables: dict[str, Any] = {}
        for sample in shown:
            name = f"eval/{sample['data_set']}-samples"
            if name not in tables:
                tables[name] = wandb.Table(columns=columns)
            row = (text_of(sample["prompt"]), sample["response"], str(sample["label"]))
            tables[name].add_data(*row, sample["reward"], sample["truncated"])
        self.run.log({**tables, "eval/step": step})

    def write_alarm(self, alarm: Mapping[str, Any]) -> None:
        """Send an alert, which W&B shows on the run's page and sends on as its user has set it."""
        text = "\n".join(f"{name}: {value}" for name, value in alarm.items())
        self.run.alert(title=str(alarm["what"]), text=text)

    def finish(self) -> None:
        """Upload what is left and end the run, within a deadline; what is not uploaded then is said, and kept."""
        problems: list[str] = []

        def end() -> None:
            try:
                self.run.finish()
            except TimeoutError:
                problems.append(f"not all of it was uploaded within {_finish_s():.0f} s")
            except Exception as error:  # noqa: BLE001 - the boundary of a thread: the run has ended well without it
                problems.append(f"it did not end well ({type(error).__name__}: {error})")

        # A daemon: the interpreter waits for no daemon when it ends.
        ending = threading.Thread(target=end, name="wandb-finish", daemon=True)
        ending.start()
        deadline_s = _finish_s() + ANSWER_MARGIN_S
        ending.join(deadline_s)
        if ending.is_alive():
            problems.insert(0, f"{SERVICE} did not answer within {deadline_s:.0f} s and was ended")
            _end_service()
            ending.join(ENDED_S)
        if problems:
            directory = self.run.settings.sync_dir
            logger.warning(
                "W&B run %s: %s; what was logged since its last upload is only in %s. To upload it: wandb sync %s",
                self.run.id, problems[0], directory, directory,
            )  # fmt: skip


def _train_steps(args: Args) -> int:
    """Train steps of a rollout."""
    return max(args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size, 1) * args.ppo_epochs


def _finish_s() -> float:
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
def _public_command_line(args: Args) -> Iterator[None]:
    """Hide secrets in sys.argv inside the block: W&B (0.31) uploads it, and no setting of it leaves that alone out."""
    own = sys.argv
    sys.argv = [own[0], *command_line_without_secrets(own[1:], vars(args))]
    try:
        yield
    finally:
        sys.argv = own
