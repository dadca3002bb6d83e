"""Where the time of a run goes: its phases, what engines and trainers did meanwhile, and each sample of a rollout.

Phases are what the driver wrote down (run_events.jsonl). A run without them is drawn from the times in its metrics, as
is what engines and trainers do: a record is written when what it tells of has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime.dashboard.records import Samples, parsed
from slime.dashboard.runs import Run
from slime.dashboard.series import finite

Span = dict[str, Any]
MOST_SPANS, MOST_SAMPLES = 3000, 600
PASSES = ("log_probs", "ref_log_probs", "teacher_log_probs", "critic_values", "actor_train", "critic_train")
PARTS = ("rollout", *PASSES, "update_weights", "save_model", "other")
LENGTH, STEP = "rollout/response_len/mean", "perf/step_time"


def progress(run: Run) -> tuple[int, int | None]:
    """Return (rollouts done, rollouts of the whole run or None); a resumed run is where it is, not where it was."""
    steps = run.series.points.get(STEP) or run.series.points.get(LENGTH)
    done, time = (int(steps.step[-1]) + 1, steps.time[-1]) if steps else (0, 0.0)
    nothing: dict[str, Any] = {}
    plan = next((event for event in reversed(run.events) if event.get("event") == "plan"), nothing)
    first, begun = plan.get("first"), plan.get("time")
    if isinstance(first, int) and isinstance(begun, int | float) and begun > time:
        done = first
    total = plan.get("num_rollout", run.flags.get("num_rollout"))
    return done, total if isinstance(total, int) else None


def rollout_seconds(run: Run) -> list[float]:
    """Seconds from one finished rollout to the next, of the newest 20."""
    points = run.series.points.get(STEP) or run.series.points.get(LENGTH)
    times = list(points.time)[-21:] if points else []
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False) if later > earlier]


def phases(run: Run) -> Iterator[Span]:
    """The driver's phases, those that have not ended without an "end"; of one inside another both are there."""
    open_phases: list[Span] = []
    for event in run.events:
        kind, time = event.get("event"), event.get("time")
        if kind == "start":
            yield from (span | {"end": time} for span in open_phases)
            open_phases.clear()
        elif kind == "begin":
            open_phases.append({"name": str(event.get("phase")), "begin": time, "rollout": event.get("rollout")})
        elif kind in ("end", "finish") and open_phases:
            yield open_phases.pop() | {"end": time}
    yield from open_phases


def current_phase(run: Run) -> dict[str, Any] | None:
    """The phase that was begun last and has not ended."""
    still = [span for span in phases(run) if "end" not in span]
    return {"name": still[-1]["name"], "since": still[-1]["begin"]} if still else None


def time_page(run: Run) -> dict[str, Any]:
    """Everything of the page Time but the lanes of samples."""
    driver = [span for span in phases(run) if isinstance(span["begin"], int | float)][-MOST_SPANS:]
    lanes = {"driver": driver, "engines": list(_spans(run, "rollout")), "trainer": list(_training(run))}
    names = run.series.points
    return {
        "lanes": {name: spans[-MOST_SPANS:] for name, spans in lanes.items()},
        "gpus": gpus_of(run.flags),
        "steps": _steps(run),
        "idle": {
            "trainer": run.series.latest("perf/wait_time_ratio"),
            "engines": _idle(lanes["engines"]),
        },
        "engine_metrics": [
            name
            for name in names
            if name.startswith(("engine", "router", "rollout/engine_loads/", "perf/request", "perf/decode"))
        ]
        + [name for name in ("perf/tokens_per_gpu_per_sec", "rollout/prefix_cache_hit_rate") if name in names],
    }


def gpus_of(flags: Mapping[str, Any]) -> dict[str, int]:
    """Return how many GPUs trainer and engines have; with --colocate they are the same ones.

    Example:
        >>> gpus_of({"actor_num_nodes": 2, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 4})
        {'trainer': 16, 'engines': 4}
    """
    nodes, per_node, engines = (
        flags.get(name) for name in ("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus")
    )
    found = {"trainer": nodes * per_node} if isinstance(nodes, int) and isinstance(per_node, int) else {}
    return found | ({"engines": engines} if isinstance(engines, int) else {})


def _spans(run: Run, part: str) -> Iterator[Span]:
    points = run.series.points.get(f"perf/{part}_time")
    if points:
        for step, time, seconds in zip(points.step, points.time, points.value, strict=True):
            if finite(seconds) is not None:
                yield {"name": part, "begin": time - seconds, "end": time, "rollout": step}


def _training(run: Run) -> Iterator[Span]:
    """The passes of a rollout, one after the other, which end when they are logged together."""
    by_step: dict[float, list[Span]] = {}
    for part in PASSES:
        for span in _spans(run, part):
            by_step.setdefault(span["rollout"], []).append(span)
    for spans in by_step.values():
        end = spans[-1]["end"]
        for span in reversed(spans):
            seconds = span["end"] - span["begin"]
            yield span | {"begin": end - seconds, "end": end}
            end -= seconds


def _idle(spans: list[Span]) -> float | None:
    """Share of the time of the newest 20 rollouts in which no engine generated."""
    newest = spans[-20:]
    if len(newest) < 2:
        return None
    whole = newest[-1]["end"] - newest[0]["begin"]
    busy = sum(span["end"] - span["begin"] for span in newest)
    return max(0.0, 1 - busy / whole) if whole > 0 else None


def _steps(run: Run) -> dict[str, Any]:
    """Seconds of each part of the newest 200 rollouts."""
    found = {part: run.series.select(f"perf/{part}_time") for part in (*PARTS, "step")}
    return {part: {"x": line["x"][-200:], "y": line["y"][-200:]} for part, line in found.items() if line["x"]}


def sample_lanes(samples: Samples) -> dict[str, Any]:
    """When each sample of a rollout was generated, and what it did meanwhile."""
    lanes = []
    for row, text, reward in samples.times(MOST_SAMPLES):
        times = parsed(text)
        if isinstance(times, dict) and _is_number(times.get("begin")) and _is_number(times.get("end")):
            spans = [span for span in times.get("spans") or () if isinstance(span, list) and len(span) == 3]
            kept = {key: times[key] for key in ("begin", "end", "generation_s", "reward_s", "tool_s") if key in times}
            lanes.append(kept | {"row": row, "reward": reward, "spans": spans[:50]})
    return {"lanes": sorted(lanes, key=lambda lane: lane["begin"]), "of": samples.num_rows}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and finite(value) is not None
