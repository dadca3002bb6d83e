"""What a reader sees of a run's metrics: the console's lines, one for each rollout and one for each evaluation, and
curves as a PNG.

`rollout_line` and `eval_line` turn metrics into text; `ConsoleSink` collects the records of a rollout until its line
can be written. Rollouts are named by their ids, as in file names and metrics. Everything that has no place in a line
is in metrics.jsonl, from which the curves are drawn. matplotlib is imported on first use, with the Agg canvas, so no
display is needed.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.observability.metric_table import evaluation_sets
from slime.observability.phases import seconds
from slime.observability.series import read_series

Values = Mapping[str, float]
WIDTH = 120
FIRST_TO_GO = ("grad", "clip", "tok/s", "trunc")
"""Figures that are left out, in this order, where a line would be too long."""
KEPT_DURATIONS = 20
GAP = "train/train_rollout_logprob_abs_diff"
"""It grows with the age of the weights that generated, and stays in one order of magnitude. A jump says that engines
hold other weights than the trainer thinks, or that the policy runs away from what its tokens were sampled with."""
JUMP = 100.0
LEAST_EARLIER = 3  # the first rollout of an asynchronous run is of fresh weights, the next ones are not
LEAST_MEDIAN = 2.0**-23  # the resolution of float32: below it, gaps are rounding
KEPT_GAPS = 101
TOGETHER = "\N{NO-BREAK SPACE}"  # textwrap breaks no line at it


def write_line(line: str) -> None:
    """The default output: stdout, flushed, so that the line is seen at once through a pipe."""
    sys.stdout.write(line + "\n")
    if not sys.stdout.isatty():  # a terminal flushes at the end of a line; rich would cut another thread's line in two
        sys.stdout.flush()


def rollout_line(
    values: Values,
    *,
    rollout_id: int,
    last_id: int,
    before: Values | None = None,
    took_s: float | None = None,
    left_s: float | None = None,
    marks: Sequence[str] = (),
) -> str:
    """Make the line of a rollout, which fits into `WIDTH` columns unless marks make it longer.

    Args:
        values: its metrics; those of its train steps are means over the steps.
        rollout_id: which.
        last_id: of the last rollout of the run.
        before: the metrics of the rollout before it, to show the change of the reward.
        took_s: seconds since the line before.
        left_s: seconds that the rest of the run is expected to take.
        marks: warnings at the end of the line.

    Example:
        >>> rollout_line({"rollout/raw_reward": 0.5, "train/pg_loss": 0.0}, rollout_id=3, last_id=9, took_s=2.0)
        'rollout 3/9 reward 0.500 2.0 s'
    """
    figures = _figures(values, before or {})
    times = [f"{took_s:.1f} s"] if took_s is not None else []
    times += [f"eta {seconds(left_s)}"] if left_s is not None else []

    def line() -> str:
        return " ".join([f"rollout {rollout_id:{len(str(last_id))}}/{last_id}", *figures.values(), *times])

    for name in FIRST_TO_GO:
        if len(line()) > WIDTH:
            figures.pop(name, None)
    return " ".join([line(), *marks])


def eval_line(values: Values) -> str:
    """Make the line of an evaluation; many data sets continue on lines of their own.

    Example:
        >>> eval_line({"eval/step": 8, "eval/addition": 0.75, "eval/addition-truncated_ratio": 0.0})
        'eval 8 (after rollout 7) addition 0.750'
    """
    step = int(values["eval/step"])
    when = f"after rollout {step - 1}" if step else "before training"
    sets = {f"eval/{name}" for name in evaluation_sets(values)}
    scores = [
        f"{name.removeprefix('eval/')}{TOGETHER}{value:.3f}"
        for name, value in values.items()
        if name in sets or ("-pass@" in name and name.count("/") == 1)
    ]
    line = " ".join([f"eval {step} ({when})", *scores])
    text = textwrap.fill(line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return text.replace(TOGETHER, " ")


def _figures(values: Values, before: Values) -> dict[str, str]:
    """Name of each figure that exists -> its text, in the order of the line."""
    figures: dict[str, str] = {}

    def show(name: str, metric: str, form: Callable[[float], str] = lambda value: short(value)) -> None:
        if metric in values:
            figures[name] = f"{name} {form(values[metric])}"

    is_policy = "train/pg_loss" in values
    reward = values.get("rollout/raw_reward")
    if reward is not None and (is_policy or reward):  # demonstrations have the reward 0
        change = f" ({reward - before['rollout/raw_reward']:+.3f})" if "rollout/raw_reward" in before else ""
        figures["reward"] = f"reward {reward:.3f}{change}"
    if not is_policy:  # a policy's loss says nothing: it is zero wherever the weights are those that generated
        show("loss", "train/loss", lambda value: f"{value:.4f}")
    show("len", "rollout/response_len/mean", lambda value: f"{value:.{1 if value < 100 else 0}f}")
    if values.get("rollout/truncated_ratio"):
        show("trunc", "rollout/truncated_ratio", _percent)
    show("drop", "rollout/dropped_ratio", _percent)
    show("kl", "train/kl_loss" if "train/kl_loss" in values else "rollout/kl")
    show("ent", "train/entropy_loss")
    show("vloss", "train/critic-value_loss")
    if values.get("train/pg_clipfrac"):
        show("clip", "train/pg_clipfrac", _percent)
    show("|t-e|", GAP)
    show("grad", "train/grad_norm")
    generated = "perf/tokens_per_gpu_per_sec"
    speed = values.get(generated if is_policy else "perf/actor_train_tok_per_gpu_per_sec", values.get(generated))
    if speed is not None:
        figures["tok/s"] = f"{short(speed)} tok/s"
    return figures


def _percent(value: float) -> str:
    return f"{value:.0%}" if value == 0 or value >= 0.0095 else f"{value:.1%}"


def short(value: float) -> str:
    """Two digits or three: 4.2k, 212, 0.41, 2.7e-4, 0."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        power, unit = (1e6, "M") if abs(value) >= 999_500 else (1e3, "k")
        return f"{value / power:.{1 if abs(value) < 100 * power else 0}f}{unit}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 1e-3:
        return f"{value:.2g}"
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits}e{int(exponent)}" if exponent else digits  # nan has none


def jump(value: float, earlier: Sequence[float]) -> float | None:
    """Return how many times the median of `earlier` a gap is, where that is a jump; else None."""
    known = [gap for gap in earlier if math.isfinite(gap)]
    if len(known) < LEAST_EARLIER or not math.isfinite(value):
        return None
    ratio = value / max(statistics.median(known), LEAST_MEDIAN)
    return ratio if ratio >= JUMP else None


class ConsoleSink:
    """Collects records and writes the lines.

    Args:
        write: writes one line.
        clock: seconds, from anywhere.
    """

    def __init__(self, write: Callable[[str], None] = write_line, clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._last_id = 0
        self._of_rollout: dict[str, float] = {}
        self._of_steps: dict[str, list[float]] = {}
        self._gaps: deque[float] = deque(maxlen=KEPT_GAPS)
        self._before: Values | None = None
        self._line_at = clock()
        self._durations: deque[float] = deque(maxlen=KEPT_DURATIONS)

    def begin(self, last_id: int) -> None:
        """Begin to count time: the rollouts up to `last_id` follow."""
        self._last_id, self._line_at, self._before = last_id, self._clock(), None
        self._durations.clear()

    def write(self, metrics: Values, step_key: str) -> None:
        """Take one record."""
        if step_key == "eval/step":
            self._write(eval_line(metrics))
        elif step_key == "train/step":
            for name, value in metrics.items():
                self._of_steps.setdefault(name, []).append(value)
        else:
            if metrics["rollout/step"] != self._of_rollout.get("rollout/step"):
                self._of_rollout = {}  # what was measured behind the line of the rollout before
            self._of_rollout |= metrics

    def end_rollout(self, rollout_id: int) -> None:
        """Write the line of a rollout, whose records are all here."""
        now = self._clock()
        took_s, self._line_at = now - self._line_at, now
        self._durations.append(took_s)
        means = {name: sum(values) / len(values) for name, values in self._of_steps.items()}  # fmean refuses inf - inf
        values, self._of_rollout, self._of_steps = self._of_rollout | means, {}, {}
        left = self._last_id - rollout_id
        self._write(
            rollout_line(
                values,
                rollout_id=rollout_id,
                last_id=self._last_id,
                before=self._before,
                took_s=took_s,
                left_s=left * statistics.fmean(self._durations) if left > 0 else None,
                marks=self._marks(means),
            )
        )
        self._before = values

    def _marks(self, means: Values) -> list[str]:
        """What a line says of a gap that has jumped."""
        if GAP not in means:
            return []
        ratio = jump(means[GAP], self._gaps)
        self._gaps.append(means[GAP])
        return [] if ratio is None else [f"(!) |train-engine| is {ratio:.2g}x its median: see docs/debugging.md"]

    def write_alarm(self, alarm: Mapping[str, Any]) -> None:
        """Write what is wrong."""
        self._write(f"(!) {alarm['what']}")


Series = dict[str, dict[float, float]]  # curve label -> {step: value}

ROLLOUT, STEP = "rollout", "train step"
TIMES = "seconds a rollout"
OUTLIER = 4.0  # So many times the median is far more than an evaluation or a save adds
LOSS = {"train/loss": "training"}
# Title -> (unit of the horizontal axis, {metric: legend})
PANELS: dict[str, tuple[str, dict[str, str]]] = {
    "response length (tokens)": (ROLLOUT, {"rollout/response_len/mean": "mean"}),
    "shares of a rollout": (
        ROLLOUT,
        {"rollout/truncated_ratio": "truncated responses", "rollout/dropped_ratio": "dropped groups"},
    ),
    "entropy": (STEP, {"train/entropy_loss": "mean of tokens"}),
    "KL": (STEP, {"train/kl_loss": "to the reference", "train/ppo_kl": "to the old policy"}),
    "|log-prob of trainer - of engine|": (STEP, {"train/train_rollout_logprob_abs_diff": "mean of tokens"}),
    "clipped tokens (share)": (STEP, {"train/pg_clipfrac": "policy", "train/critic-value_clipfrac": "value"}),
    "value loss": (STEP, {"train/critic-value_loss": "critic"}),
    TIMES: (
        ROLLOUT,
        {"perf/step_time": "all", "perf/rollout_time": "generation", "perf/actor_train_time": "training"},
    ),
}


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        title: of the plot.
        unit: what the horizontal axis counts.
        curves: legend -> {step: value}; never empty.
    """

    title: str
    unit: str
    curves: Series


def select_panels(series: Mapping[str, dict[float, float]]) -> list[Panel]:
    """The panels for which there is data, in the order of the picture."""

    def pick(names: Mapping[str, str]) -> Series:
        return {label: series[name] for name, label in names.items() if name in series}

    hidden = {"train/loss"} if "train/pg_loss" in series else set()  # a policy's loss is zero on the weights it is of
    sets = sorted(evaluation_sets(series))
    panels = [
        Panel("reward", ROLLOUT, pick({"rollout/raw_reward": "mean", "rollout/greedy_reward": "of greedy answers"})),
        Panel("loss", STEP, pick({name: label for name, label in LOSS.items() if name not in hidden})),
        Panel("evaluation", "rollouts trained", pick({f"eval/{name}": name for name in sets})),
        *(Panel(title, unit, pick(names)) for title, (unit, names) in PANELS.items()),
    ]
    is_demonstrated = "train/loss" in series and not hidden and not any(series.get("rollout/raw_reward", {}).values())
    return [panel for panel in panels if panel.curves and not (is_demonstrated and panel.title == "reward")]


def upper_limit(curves: Series) -> float:
    """The top of an axis of times that outliers do not flatten: the first step of a run holds its whole start."""
    usual = [
        value
        for points in curves.values()
        for value in points.values()
        if value <= OUTLIER * statistics.median(points.values())
    ]
    return 1.1 * max(usual) or 1.0


def write_curves(metrics_path: Path, png_path: Path) -> bool:
    """Draw the run's panels; False when there is nothing to draw."""
    panels = select_panels(read_series(metrics_path))
    if not panels:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(panels), 2 if len(panels) <= 4 else 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    plots = figure.subplots(rows, columns, squeeze=False).flat
    for axes, panel in itertools.zip_longest(plots, panels):
        if panel is None:
            axes.set_visible(False)
            continue
        for label, points in panel.curves.items():
            steps = sorted(points)
            axes.plot(steps, [points[step] for step in steps], marker=".", linewidth=1, label=label)
        if panel.title == TIMES:
            axes.set_ylim(0, upper_limit(panel.curves))
        axes.set_title(panel.title)
        axes.set_xlabel(panel.unit)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    png_path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png_path, dpi=110)
    return True
