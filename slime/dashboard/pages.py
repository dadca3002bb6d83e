"""The JSON behind the pages Run, Curves, Compare and Evaluation, from what a run has written."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from slime.dashboard.runs import Run, SampleFile, current_phase, progress, rollout_seconds
from slime.observability.metric_table import describe, evaluation_sets
from slime.observability.series import AXES, finite, is_inside, read_object, read_text

ITERATION = re.compile(r"iter_(\d+)")
WARNING = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b")
MOST_WARNINGS, LOG_TAIL = 20, 16 << 10
MOST_PROBLEMS, SHOWN_PROMPT, SHOWN_ANSWER = 400, 300, 2000
RECENT_ROLLOUTS = 5
STEP = "train/step"
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
        "restarts": max(0, sum(event.get("event") == "plan" for event in run.events) - 1),
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


def recent_alarms(run: Run) -> list[dict[str, Any]]:
    """Alarms of the newest rollouts, one of each name."""
    done, _ = progress(run)
    alarms = run.series.alarms  # those of a lost attempt may lie ahead of where the run is now
    recent = [alarm for alarm in alarms if done - RECENT_ROLLOUTS <= (alarm.get("step") or 0) <= done]
    newest = {alarm.get("name"): alarm for alarm in recent}
    return [alarm for alarm in newest.values() if alarm.get("state") != "ended"]


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
        for line in reversed((read_text(path, run.root, limit=LOG_TAIL, from_end=True) or "").splitlines()):
            text = line.partition("] ")[2] or line
            if WARNING.search(line[:120]) and text not in seen and len(seen) < MOST_WARNINGS:
                seen.add(text)
                yield {"log": path.name, "text": line[:2000]}


def metric_names(run: Run) -> dict[str, Any]:
    """Which metrics a run has, their newest values, what they mean, and which axes they can be drawn over."""
    metrics = {
        name: {"step_key": points.step_key, "last": finite(points.value[-1]), "points": len(points.value)}
        for name, points in sorted(run.series.points.items())
    }
    axes = AXES if run.samples_per_rollout and "rollout/response_len/mean" in metrics else AXES[:2]
    trained, done = (furthest(run, key) for key in (STEP, "rollout/step"))
    docs = {name: asdict(row) for name in metrics if (row := describe(name)) is not None}
    per_rollout = max(1, round(trained / max(1, done)))
    return {"metrics": metrics, "docs": docs, "axes": axes, "steps_per_rollout": per_rollout}


def furthest(run: Run, step_key: str) -> float:
    """Return how many steps of a kind the run has ever made, in all attempts."""
    return max(
        (max(points.step) + 1 for points in run.series.points.values() if points.step_key == step_key), default=0
    )


def rollout_list(files: Iterable[SampleFile]) -> list[dict[str, Any]]:
    """The files of samples, newest first."""
    newest = sorted(files, key=lambda file: (file.rollout_id, file.is_eval), reverse=True)
    return [
        {"name": file.name, "rollout": file.rollout_id, "is_eval": file.is_eval, "bytes": file.size} for file in newest
    ]


# ---- evaluations


def evaluation_page(run: Run, wanted: str) -> dict[str, Any]:
    """Every set with its mean and standard error at each step, and the problems of one set over the steps.

    Args:
        run: which.
        wanted: the set; another one where there is none of the name.
    """
    marks = problem_rewards(run)
    names = set(evaluation_sets(run.series.points))
    names |= {dataset for by_set in marks.values() for dataset in by_set}
    chosen = wanted if wanted in names else min(names, default="")
    sets = {name: _set_over_steps(run, name, marks) for name in sorted(names)}
    steps = sorted(step for step, by_set in marks.items() if chosen in by_set)
    problems = sorted({problem for step in steps for problem in marks[step][chosen]})[:MOST_PROBLEMS]
    return {
        "sets": sets,
        "set": chosen,
        "steps": steps,
        "problems": [
            {"prompt": prompt, "label": label, "marks": [marks[step][chosen].get((prompt, label)) for step in steps]}
            for prompt, label in problems
        ],
    }


def problem_rewards(run: Run) -> dict[int, dict[str, dict[tuple[str, str], dict[str, Any]]]]:
    """Step -> set -> (prompt, label) -> {"reward": mean, "count", "file", "row"}, from recorded evaluations, and from
    eval_samples.jsonl where those are not kept."""
    found: dict[int, Any] = {}
    for answer in run.answers:
        step, reward = answer.get("eval/step"), answer.get("reward")
        if isinstance(step, int) and isinstance(reward, int | float) and finite(reward) is not None:
            prompt = answer["prompt"] if isinstance(answer.get("prompt"), str) else json.dumps(answer.get("prompt"))
            key = (prompt[:SHOWN_PROMPT], str(answer.get("label")))
            mark = {"reward": reward, "count": 1, "response": str(answer.get("response"))[:SHOWN_ANSWER]}
            found.setdefault(step, {}).setdefault(str(answer.get("data_set")), {})[key] = mark
    for file in run.rollouts.files.values():
        if file.is_eval:
            found[file.rollout_id] = run.kept(file, partial(_marks_of_file, file))
    return found


def _marks_of_file(file: SampleFile) -> dict[str, dict[tuple[str, str], dict[str, Any]]]:
    from slime.dashboard.records import Samples  # imports pyarrow

    rewards: dict[tuple[str, str, str], list[float]] = {}
    rows: dict[tuple[str, str, str], int] = {}
    for row in Samples(file).problems():
        key = (row["dataset"] or "", (row["prompt_preview"] or "")[:SHOWN_PROMPT], row["label"] or "")
        if row["reward"] is not None:
            rewards.setdefault(key, []).append(row["reward"])
            rows.setdefault(key, row["row"])
    found: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for (dataset, prompt, label), values in rewards.items():
        mark = {"reward": sum(values) / len(values), "count": len(values), "file": file.name}
        found.setdefault(dataset, {})[prompt, label] = mark | {"row": rows[dataset, prompt, label]}
    return found


def _set_over_steps(run: Run, name: str, marks: Mapping[int, Any]) -> dict[str, Any]:
    """Means as they were logged, with standard errors over problems where these are known."""
    line = run.series.select(f"eval/{name}")
    logged = dict(zip(line["x"], line["y"], strict=True))
    steps = sorted({*logged, *(step for step, by_set in marks.items() if name in by_set)})
    means, errors = [], []
    for step in steps:
        values = [mark["reward"] for mark in marks.get(int(step), {}).get(name, {}).values()]
        mean = sum(values) / len(values) if values else None
        means.append(logged.get(step, mean))
        errors.append(statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None)
    return {"x": steps, "y": means, "error": errors}


# ---- several runs


def compare_page(runs: Sequence[Run]) -> dict[str, Any]:
    """What is different between runs: flags, newest metrics, answers to the same problems."""
    names = {name for run in runs for name in run.flags}
    flags = {name: [run.flags.get(name) for run in runs] for name in sorted(names)}
    nothing: dict[tuple[str, str, str], Any] = {}
    newest = [_newest_marks(run) for run in runs]
    common = sorted(set.intersection(*(set(marks) for marks in newest or [nothing])))
    problems = [
        {"set": key[0], "prompt": key[1], "label": key[2], "marks": [marks[key] for marks in newest]} for key in common
    ]
    problems.sort(key=lambda problem: _spread(problem["marks"]), reverse=True)
    metrics = {name for run in runs for name in run.series.points if name in HEADLINES or name.count("/") == 1}
    return {
        "runs": [overview(run) for run in runs],
        "has_flags": [bool(run.flags) for run in runs],
        "flags": {name: values for name, values in flags.items() if any(value != values[0] for value in values[1:])},
        "metrics": {name: [run.series.latest(name) for run in runs] for name in sorted(metrics)},
        "problems": problems[:MOST_PROBLEMS],
        "num_problems": len(problems),
    }


def _newest_marks(run: Run) -> dict[tuple[str, str, str], Any]:
    marks = problem_rewards(run)
    newest = marks[max(marks)] if marks else {}
    return {(dataset, *problem): mark for dataset, problems in newest.items() for problem, mark in problems.items()}


def _spread(marks: Sequence[Mapping[str, Any]]) -> float:
    rewards = [mark["reward"] for mark in marks if mark["reward"] is not None]
    return max(rewards) - min(rewards) if rewards else 0.0
