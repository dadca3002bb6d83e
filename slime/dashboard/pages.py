"""The JSON behind the pages Run and Curves, from what a run has written; nothing is read here that `Run` has read."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from slime.dashboard.files import is_inside, read_object, read_text, tail
from slime.dashboard.records import RolloutFile
from slime.dashboard.runs import Run
from slime.dashboard.series import AXES, finite

ITERATION = re.compile(r"iter_(\d+)")
WARNING = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b")
MOST_WARNINGS = 20
RECENT_ROLLOUTS = 5
LATE = 6.0  # A rollout that takes so many times the median is late: as the watchdog counts (--stall-timeout).
HEADLINES = (
    "rollout/raw_reward",
    "rollout/response_len/mean",
    "rollout/truncated_ratio",
    "train/entropy_loss",
    "train/grad_norm",
    "train/train_rollout_logprob_abs_diff",
    "perf/step_time",
    "perf/tokens_per_gpu_per_sec",
)


def overview(run: Run) -> dict[str, Any]:
    """One line of the list of runs."""
    rollout, total = progress(run)
    return {
        "id": run.id,
        "name": run.name,
        "status": run.status(),
        "rollout": rollout,
        "num_rollout": total,
        "started": run.start.get("time") or run.series.first_time or None,
        "last_time": run.series.last_time or None,
        "alarms": len(recent_alarms(run)),
        "reward": run.series.latest("rollout/raw_reward"),
        "has_rollouts": bool(run.rollouts.files),
        "version": run.version,
    }


def run_page(run: Run) -> dict[str, Any]:
    """Everything of the page Run."""
    page = overview(run)
    phase = current_phase(run) if page["status"] == "running" else None
    error = read_text(run.directory / "logs" / "error.txt", run.root, limit=8 << 10)
    seconds = rollout_seconds(run)
    left = max(0, page["num_rollout"] - page["rollout"]) if page["num_rollout"] is not None else None
    page |= {
        "directory": str(run.directory),
        "phase": phase,
        "rollout_seconds": statistics.median(seconds) if seconds else None,
        "eta_s": statistics.median(seconds) * left if seconds and left and page["status"] == "running" else None,
        "checkpoints": checkpoints(run),
        "restarts": max(0, sum(event.get("event") in ("start", "plan") for event in run.events) // 2 - 1),
        "command": run.start.get("command"),
        "resume": run.start.get("resume"),
        "host": run.start.get("host"),
        "error": error if page["status"] in ("failed", "ended", "lost") else None,
        "end": next((event for event in reversed(run.events) if event.get("event") == "finish"), None),
        "stall_report": read_text(run.directory / "stall_report.txt", run.root, limit=16 << 10),
        "warnings": list(warnings(run)),
        "alarm_list": run.series.alarms[-50:],
        "headlines": {name: run.series.latest(name) for name in HEADLINES if name in run.series.points},
    }
    return page | {"lights": list(lights(run, page))}


def progress(run: Run) -> tuple[int, int | None]:
    """Return (rollouts done, rollouts of the whole run or None)."""
    steps = run.series.points.get("perf/step_time") or run.series.points.get("rollout/response_len/mean")
    done = int(max(steps.step)) + 1 if steps else 0
    nothing: dict[str, Any] = {}
    plan = next((event for event in reversed(run.events) if event.get("event") == "plan"), nothing)
    total = plan.get("num_rollout", run.flags.get("num_rollout"))
    return done, total if isinstance(total, int) else None


def rollout_seconds(run: Run) -> list[float]:
    """Seconds from one finished rollout to the next, of the newest 20."""
    points = run.series.points.get("perf/step_time") or run.series.points.get("rollout/response_len/mean")
    times = list(points.time)[-21:] if points else []
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False) if later > earlier]


def current_phase(run: Run) -> dict[str, Any] | None:
    """The phase that was begun last and has not ended."""
    open_phases: list[dict[str, Any]] = []
    for event in run.events:
        kind = event.get("event")
        if kind == "start":
            open_phases.clear()
        elif kind == "begin":
            open_phases.append(event)
        elif kind == "end" and open_phases:
            open_phases.pop()
    return {"name": open_phases[-1].get("phase"), "since": open_phases[-1].get("time")} if open_phases else None


def recent_alarms(run: Run) -> list[dict[str, Any]]:
    """Alarms of the newest rollouts, one of each name."""
    done, _ = progress(run)
    recent = [alarm for alarm in run.series.alarms if (alarm.get("step") or 0) >= done - RECENT_ROLLOUTS]
    return list({alarm.get("name"): alarm for alarm in recent}.values())


def lights(run: Run, page: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Traffic lights: what is good, what to look at, what is wrong."""
    status, alarms = page["status"], recent_alarms(run)
    color = {"failed": "red", "lost": "red", "ended": "amber", "stopped": "amber"}.get(status, "green")
    says = {"lost": "its process is gone", "ended": "it does not say how"}.get(status, "")
    yield _light("process", color, status + (f": {says}" if says else ""))
    seconds = rollout_seconds(run)
    if status == "running" and seconds:
        silent = time.time() - run.series.last_time
        is_late = silent > max(60.0, LATE * statistics.median(seconds))
        text = f"last record {silent:.0f} s ago, a rollout takes {statistics.median(seconds):.0f} s"
        yield _light("progress", "amber" if is_late else "green", text)
    names = ", ".join(str(alarm.get("name")) for alarm in alarms)
    yield _light("alarms", "amber" if alarms else "green", names or f"none in the last {RECENT_ROLLOUTS} rollouts")
    if page["stall_report"]:
        yield _light("stalls", "red", "a phase stalled: see the report below")
    newest = page["checkpoints"][-1:] or None
    text = f"rollout {newest[0]['iteration']}" if newest else "none: give --save and --save-interval"
    yield _light("checkpoint", "green" if newest else "amber", text)
    if run.series.num_broken:
        yield _light("metrics", "amber", f"{run.series.num_broken} lines of metrics.jsonl hold no record")


def _light(name: str, color: str, text: str) -> dict[str, str]:
    return {"name": name, "color": color, "text": text}


def checkpoints(run: Run) -> list[dict[str, Any]]:
    """Complete iterations, oldest first, of --save where that lies in the given directories."""
    saved = run.flags.get("save")
    for directory in (
        Path(saved) if isinstance(saved, str) else run.directory,
        run.directory,
        run.directory / "saved",
    ):
        if not is_inside(directory, run.root) or not directory.is_dir():
            continue
        paths = [path for path in directory.iterdir() if ITERATION.fullmatch(path.name) and is_inside(path, run.root)]
        if paths:
            return [_checkpoint(path, run.root) for path in sorted(paths)]
    return []


def _checkpoint(path: Path, root: Path) -> dict[str, Any]:
    files = read_object(path / "manifest.json", root).get("files")
    sizes = (
        [entry.get("size") for entry in files.values() if isinstance(entry, dict)] if isinstance(files, dict) else []
    )
    return {
        "iteration": int(path.name.removeprefix("iter_")),
        "time": path.stat().st_mtime,
        "bytes": sum(size for size in sizes if isinstance(size, int)) or None,
    }


def warnings(run: Run) -> Iterator[dict[str, str]]:
    """The newest warnings and errors of the logs, one of each text."""
    logs = run.directory / "logs"
    if not is_inside(logs, run.root) or not logs.is_dir():
        return
    seen: set[str] = set()
    for path in sorted(logs.glob("*.log"))[:64]:
        for line in reversed((tail(path, run.root) or "").splitlines()):
            text = line.partition("] ")[2] or line
            if WARNING.search(line[:120]) and text not in seen and len(seen) < MOST_WARNINGS:
                seen.add(text)
                yield {"log": path.name, "text": line[:2000]}


def metric_names(run: Run) -> dict[str, Any]:
    """Which metrics a run has, with their newest values, and which axes they can be drawn over."""
    metrics = {
        name: {"step_key": points.step_key, "last": finite(points.value[-1]), "points": len(points.value)}
        for name, points in sorted(run.series.points.items())
    }
    axes = AXES if run.samples_per_rollout and "rollout/response_len/mean" in metrics else AXES[:2]
    return {"metrics": metrics, "axes": axes, "alarms": run.series.alarms[-200:]}


def rollout_list(files: Iterable[RolloutFile]) -> list[dict[str, Any]]:
    """The files of samples, newest first."""
    newest = sorted(files, key=lambda file: (file.rollout_id, file.is_eval), reverse=True)
    return [
        {"name": file.name, "rollout": file.rollout_id, "is_eval": file.is_eval, "bytes": file.size} for file in newest
    ]
