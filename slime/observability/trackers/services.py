"""TensorBoard, MLflow, SwanLab and trackio as trackers; each library is imported on first use and set up by its own
variables.

MLflow: mlflow-skinny is enough. SwanLab reads SWANLAB_MODE, SWANLAB_API_KEY, SWANLAB_WORKSPACE and SWANLAB_API_HOST.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.config.args import Args
from slime.observability.trackers import EvalSample, Step, TrackedRun, alarm_text, need_room, text_of
from slime.utils.errors import UsageError

BATCH = 1000  # metrics in a request, as the server allows
PARAMS = 100
LONGEST_PARAM = 6000
REFUSED = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")
# The writer tries again by itself, and must get the thread back: MLflow's own are 120 s and 7 tries.
LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "30", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


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


class MlflowTracker:
    """One MLflow run."""

    def __init__(self, args: Args) -> None:
        self._client: Any = None
        self._run_id = ""

    def open(self, config: Mapping[str, Any], run: TrackedRun) -> str | None:
        """Begin the run, or set the one that goes on to running.

        Raises:
            ImportError: mlflow is not installed.
            MlflowException: the server does not answer, or refuses.
        """
        for name, value in LIMITS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # a database, which it wants instead, needs SQLAlchemy
            uri = (run.directory / "mlruns").resolve().as_uri()
        client = MlflowClient(tracking_uri=uri)
        if run.known is not None:
            # A file store empties the run's own file when the disk is full: it is written where there is a reason.
            if client.get_run(run.known).info.status != "RUNNING":
                client.update_run(run.known, status="RUNNING")
            self._client, self._run_id = client, run.known
            return f"{uri}, run {run.known}"
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "slime")
        experiment = client.get_experiment_by_name(name)
        experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
        run_name = os.environ.get("MLFLOW_RUN_NAME", run.name)
        made = client.create_run(experiment_id, run_name=run_name)
        self._client, self._run_id = client, made.info.run_id
        params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in config.items()]
        for start in range(0, len(params), PARAMS):
            client.log_batch(self._run_id, params=params[start : start + PARAMS])
        run.keep(self._run_id)
        return f"{uri}, run {self._run_id}"

    def log(self, metrics: Mapping[str, float], step: Step) -> None:
        """Write the values of a record.

        Raises:
            ValueError: the server does not take them.
        """
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        time_ms = int(step.time_s * 1000)
        values = [Metric(self._name(key), float(value), time_ms, step.number) for key, value in metrics.items()]
        try:
            for start in range(0, len(values), BATCH):
                self._client.log_batch(self._run_id, metrics=values[start : start + BATCH])
        except MlflowException as error:
            if error.error_code in REFUSED:
                raise ValueError(str(error)) from error
            raise

    def log_samples(self, samples: Sequence[EvalSample], step: Step) -> None:
        """Write the answers as a JSON artifact of their evaluation."""
        self._client.log_dict(self._run_id, {"samples": list(samples)}, f"eval_samples/{step.number:07d}.json")

    def log_alarm(self, alarm: Mapping[str, Any], step: Step) -> None:
        """Write an alarm as a text artifact, and what is wrong as the tag "alarm"."""
        self._client.set_tag(self._run_id, "alarm", str(alarm["what"]))
        name = _NOT_IN_NAMES.sub("_", str(alarm.get("name", "alarm"))).replace("/", "_")
        self._client.log_text(self._run_id, alarm_text(alarm), f"alarms/{step.number:07d}-{name}.txt")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Say how the run ended."""
        for name, value in summary.items():
            self._client.set_tag(self._run_id, f"slime.{name}", str(value))
        status = "FINISHED" if summary["status"] == "finished" else "FAILED"
        self._client.set_terminated(self._run_id, status)

    @staticmethod
    def _name(metric: str) -> str:
        """A metric's name in MLflow, which knows no @ (eval/gsm8k-pass@4)."""
        return _NOT_IN_NAMES.sub("_", metric)


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
