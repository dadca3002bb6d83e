"""Runs of train.py on the quick start's task that a benchmark compares: one start, one Ray, resumed run by run.

A benchmark names its runs (`TinyRun`) and calls `run_all`; what they leave is read by `read_curve` and shown by
`write_table` and `plot_curves`. A run is complete when its folder holds a done.json with the flags that it is asked
to have; it is then not repeated. It keeps metrics.jsonl and console.log, no weights and no logs of processes.
It knows neither what the flags of a run mean nor what a benchmark concludes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from examples.tiny_cpu.make_data import eval_config  # noqa: E402
from slime.observability.console import read_series  # noqa: E402
from slime.processes.registry import registry  # noqa: E402

ACCURACY = "eval/addition"
EVAL_INTERVAL = 5  # rollouts
EVAL_SAMPLES = 4  # of each of the 250 held-out problems, as in the quick start
Curve = dict[float, float]  # step -> value


@dataclass(frozen=True)
class TinyRun:
    """One run.

    Attributes:
        name: its folder in the benchmark's output.
        flags: of the script; `{start}` stands for the folder of the start, `{eval}` for the evaluation file. The
            runner adds --accelerator, --output-dir and the threads.
        script: from the root of the repository.
        slots: that it takes of Ray: 1 with --colocate, else trainers + engines.
        env: more environment variables; no part of what makes a run complete.
    """

    name: str
    flags: tuple[str, ...]
    script: str = "train.py"
    slots: int = 1
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def recipe(self) -> list[str]:
        """What must be the same for a complete run to count: nothing of the machine."""
        return [self.script, *self.flags]


def tiny_flags(*more: Any, steps: int, seed: int, eval_interval: int = EVAL_INTERVAL) -> tuple[str, ...]:
    """The flags of the quick start's GRPO run, but for placement, reward, estimator and learning rate (`more`)."""
    flags = [
        "--seed", seed, "--rollout-seed", seed, "--hf-checkpoint", "{start}/sft/hf", "--model-args-from-hf",
        "--prompt-data", "{start}/data/train.jsonl", "--input-key", "prompt", "--label-key", "label",
        "--apply-chat-template", "--rollout-shuffle",
        "--num-rollout", steps, "--rollout-batch-size", 64, "--n-samples-per-prompt", 8, "--global-batch-size", 512,
        "--rollout-max-response-len", 5, "--rollout-temperature", 1, "--sglang-enable-deterministic-inference",
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", 8192, "--lr-decay-style", "constant", "--weight-decay", 0,
        "--eval-config", "{eval}", "--eval-interval", eval_interval,
    ]  # fmt: skip
    return tuple(str(flag) for flag in [*flags, *more])


def add_options(parser: argparse.ArgumentParser, output: str) -> None:
    """The options of every benchmark of such runs; `output` is the default folder, below outputs/."""
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / output)
    parser.add_argument("--start", type=Path, help="OUTPUT of a run of scripts/run-tiny-cpu.sh (default: made here)")
    parser.add_argument("--accelerator", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; each gets its share of the cores")
    parser.add_argument(
        "--stop-after", type=float, default=float("inf"), metavar="SECONDS", help="end then; call again to go on"
    )
    parser.add_argument("--extra-flags", default="", help="more flags for every run, as one text")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--only-run", action="store_true", help="no table, no plot, no judgement")
    part.add_argument("--report", action="store_true", help="of what is complete; nothing is run")


# ---- running


def run_all(runs: Sequence[TinyRun], options: argparse.Namespace) -> list[str]:
    """Do every run that is not complete, `options.jobs` at a time; prints a line as each begins and ends.

    Args:
        runs: in the order in which they begin.
        options: of a parser with `add_options`.

    Returns:
        A sentence for each run that failed, or for which the time did not suffice.
    """
    deadline = time.monotonic() + options.stop_after
    options.output = options.output.resolve()
    if all(is_complete(run, options.output) for run in runs):
        return []
    slots = options.jobs * max(run.slots for run in runs)
    with ray_head(slots, options.accelerator) as address:
        env = {**os.environ, "RAY_ADDRESS": address}
        start = prepare_start(options, env)
        todo = [run for run in runs if not is_complete(run, options.output)]
        return _Pool(options, start, env, deadline).work(todo)


def is_complete(run: TinyRun, output: Path) -> bool:
    """Whether the run ended well with the same script and flags."""
    done = output / run.name / "done.json"
    return done.is_file() and json.loads(done.read_text())["recipe"] == run.recipe


@contextmanager
def ray_head(slots: int, accelerator: str) -> Iterator[str]:
    """A Ray of this process, with the GPUs of the machine or `slots` slots; yields its address, and ends it."""
    import ray

    from slime.ray.utils import SLOT_RESOURCE

    os.environ.setdefault("RAY_worker_niceness", "0")  # as train.py does: else trainers starve on a busy machine
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    resources = {SLOT_RESOURCE["cpu"]: float(slots)} if accelerator == "cpu" else None
    context = ray.init(
        address="local", resources=resources, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False
    )
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()


def prepare_start(options: argparse.Namespace, env: Mapping[str, str]) -> Path:
    """The folder with the SFT model and the data; made by the quick start's script (on CPU) unless it is there."""
    start = (options.start or options.output / "start").resolve()
    if not (start / "sft/hf/config.json").is_file():
        if options.start:
            sys.exit(f"--start {options.start}: there is no sft/hf/config.json in it; leave it out to have one made")
        print(f"start: SFT, in {start}", flush=True)
        env = {**env, "OUTPUT": str(start), "GRPO_STEPS": "0", "SLIME_PYTHON": sys.executable}
        options.output.mkdir(parents=True, exist_ok=True)
        with (options.output / "start.log").open("w") as log:
            script = ["bash", str(ROOT / "scripts/run-tiny-cpu.sh")]
            subprocess.run(script, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=True)
    return start


@dataclass
class _Started:
    run: TinyRun
    process: subprocess.Popen[bytes]
    at: float


class _Pool:
    """Keeps `options.jobs` runs going until all are done or the time is over."""

    def __init__(self, options: argparse.Namespace, start: Path, env: Mapping[str, str], deadline: float) -> None:
        self._options, self._start, self._env, self._deadline = options, start, env, deadline
        self._running: list[_Started] = []
        self._seconds = 0.0  # of the longest run so far

    def work(self, todo: list[TinyRun]) -> list[str]:
        """Returns a sentence for each run that is not complete."""
        problems: list[str] = []
        todo = list(todo)
        while todo or self._running:
            while todo and len(self._running) < self._options.jobs and self._fits():
                self._running.append(self._begin(todo.pop(0)))
            if not self._running:
                return problems + [f"{run.name}: not run, the time was over" for run in todo]
            time.sleep(0.5)
            problems += self._harvest()
        return problems

    def _fits(self) -> bool:
        return time.monotonic() + self._seconds < self._deadline

    def _begin(self, run: TinyRun) -> _Started:
        folder = self._options.output / run.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = self._command(run, folder)
        (folder / "command.txt").write_text(shlex.join(command) + "\n")
        print(f"{run.name}: begun", flush=True)
        env = {**self._env, "OMP_NUM_THREADS": str(self._threads()), **run.env}
        process = registry().start(command, name=run.name, log_path=folder / "console.log", env=env, cwd=ROOT)
        return _Started(run, process, time.monotonic())

    def _command(self, run: TinyRun, folder: Path) -> list[str]:
        evaluation = self._options.output / "eval.yaml"
        evaluation.write_text(eval_config(self._start / "data/eval.jsonl", EVAL_SAMPLES))
        options = self._options
        command = [sys.executable, str(ROOT / run.script), "--accelerator", options.accelerator]
        command += ["--output-dir", str(folder)]
        if options.accelerator == "cpu" and run.script.startswith("train"):
            # A trainer takes all cores otherwise: it knows of no other run.
            command += ["--train-env-vars", json.dumps({"OMP_NUM_THREADS": str(self._threads())})]
        flags = [*run.flags, *shlex.split(options.extra_flags)]
        places = {"{start}": str(self._start), "{eval}": str(evaluation)}
        return command + [_put(flag, places) for flag in flags]

    def _threads(self) -> int:
        return max(1, len(os.sched_getaffinity(0)) // self._options.jobs)

    def _harvest(self) -> list[str]:
        """Look after the runs that ended, and end all when the time is over."""
        problems, still = [], []
        time_is_over = time.monotonic() > self._deadline
        for started in self._running:
            status = started.process.poll()
            if status is None and not time_is_over:
                still.append(started)
                continue
            registry().end(started.process, grace_s=20.0)
            name, seconds = started.run.name, time.monotonic() - started.at
            if status == 0:
                self._seconds = max(self._seconds, seconds)
                _complete(started.run, self._options.output / name, seconds)
                print(f"{name}: done in {seconds:.0f} s", flush=True)
            elif status is None:
                problems.append(f"{name}: ended after {seconds:.0f} s, the time was over")
            else:
                log = self._options.output / name / "console.log"
                problems.append(f"{name}: exit status {status} after {seconds:.0f} s; {_last_line(log)}")
                print(problems[-1], flush=True)
        self._running = still
        return problems


def _put(text: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        text = text.replace(name, value)
    return text


def _complete(run: TinyRun, folder: Path, seconds: float) -> None:
    shutil.rmtree(folder / "logs", ignore_errors=True)
    (folder / "curves.png").unlink(missing_ok=True)
    (folder / "done.json").write_text(json.dumps({"recipe": run.recipe, "seconds": seconds}))


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), f"nothing in {log}")


# ---- reading and showing


def read_curve(folder: Path, metric: str = ACCURACY) -> Curve:
    """A metric of a run by its step, in order; empty when the run never logged it."""
    path = folder / "metrics.jsonl"
    points = read_series(path).get(metric, {}) if path.is_file() else {}
    return dict(sorted(points.items()))


def first_step_at(curve: Curve, level: float) -> float | None:
    """The first step at which the curve is at `level` or above; None when it never is."""
    return next((step for step, value in curve.items() if value >= level), None)


def write_table(rows: Sequence[Sequence[Any]], headers: Sequence[str], path: Path) -> None:
    """Print a table as Markdown, and write it."""
    from tabulate import tabulate

    text = tabulate(rows, headers, tablefmt="github", disable_numparse=True)
    print(text)
    path.write_text(text + "\n")


def plot_curves(groups: Mapping[str, Sequence[Curve]], path: Path, *, title: str, ylabel: str = "accuracy") -> None:
    """Draw each group's mean over its curves (the seeds), in a band from the lowest to the highest, as a PNG.

    Args:
        groups: label -> curves; of their steps those that all have are drawn.
        path: of the PNG.
        title: of the figure.
        ylabel: what the values are.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for label, curves in groups.items():
        steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        if not steps:
            continue
        columns = [[curve[step] for curve in curves] for step in steps]
        (line,) = axes.plot(steps, [sum(column) / len(column) for column in columns], marker=".", label=label)
        if len(curves) > 1:
            low, high = [min(column) for column in columns], [max(column) for column in columns]
            axes.fill_between(steps, low, high, alpha=0.12, color=line.get_color())
    axes.set(title=title, xlabel="step", ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
