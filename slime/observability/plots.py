"""Curves of one run as a PNG, drawn from its metrics.jsonl.

It knows the names of the few metrics that it draws; it does not know the run. matplotlib is imported on first use,
with the Agg canvas, so no display is needed.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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


def read_records(path: Path) -> Iterator[dict[str, float | str]]:
    """The records of a metrics.jsonl; a last line cut short by a killed run is left out."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n") and line.strip():
                yield json.loads(line)


def read_series(path: Path) -> Series:
    """Every metric of the file as `{name: {step: value}}`; of a step logged twice (a resumed run) the later wins."""
    series: Series = {}
    for record in read_records(path):
        step = record.get(str(record["step_key"]))
        if not isinstance(step, int | float):
            continue
        for name, value in record.items():
            if isinstance(value, int | float) and name not in ("time", record["step_key"]):
                series.setdefault(name, {})[step] = float(value)
    return series


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
    sets = sorted(name for name in series if name.startswith("eval/") and name.count("/") == 1 and "-" not in name)
    panels = [
        Panel("reward", ROLLOUT, pick({"rollout/raw_reward": "mean", "rollout/greedy_reward": "of greedy answers"})),
        Panel("loss", STEP, pick({name: label for name, label in LOSS.items() if name not in hidden})),
        Panel("evaluation", "rollouts trained", pick({name: name.removeprefix("eval/") for name in sets})),
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
