"""Curves of one run as a PNG, drawn from its metrics.jsonl.

It knows the names of the few metrics that it draws; it does not know the run. matplotlib is imported on first use,
with the Agg canvas, so no display is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

Series = dict[str, dict[float, float]]  # curve label -> {step: value}


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


def select_panels(series: Mapping[str, dict[float, float]]) -> dict[str, Series]:
    """The four panels: title -> curves. A panel without data is present and empty."""

    def pick(*names: str) -> Series:
        return {name: series[name] for name in names if name in series}

    accuracies = [name for name in series if name.startswith("eval/") and name.count("/") == 1 and "-" not in name]
    return {
        "reward": pick("rollout/raw_reward"),
        "evaluation": pick(*sorted(accuracies)),
        "response length (tokens)": pick("rollout/response_len/mean"),
        "step time (s)": pick("perf/step_time", "perf/rollout_time", "perf/actor_train_time"),
    }


def write_curves(metrics_path: Path, png_path: Path) -> bool:
    """Draw reward, evaluation, response length and step time against the step; False when there is nothing to draw."""
    panels = select_panels(read_series(metrics_path))
    if not any(panels.values()):
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, curves) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for name, points in curves.items():
            steps = sorted(points)
            axes.plot(steps, [points[step] for step in steps], marker=".", linewidth=1, label=name)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if curves:
            axes.legend(fontsize=7)
        else:
            axes.text(0.5, 0.5, "not logged", ha="center", transform=axes.transAxes)
    png_path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png_path, dpi=110)
    return True
