"""Alarms: from the records of a run to what is wrong with it, since when, by which numbers, and the flags to try.

`find` is a pure function of the series of metrics; `AlarmWatch` follows a run and says when an alarm begins and ends.
Alarms are about trends. One number that cannot be right ends a run with --ci-test instead.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slime.config.alarm_settings import KEPT, AlarmSettings, Below, Collapse, Falling, Flat, Growth, Jump, Level
from slime.observability.console import short

BEFORE = 20
"""Points before the newest that say what is usual; half of them must be there."""
DOCS = "docs/alarms.md"
ROLLOUT = "rollout/step"


class Point(NamedTuple):
    """A value of a metric, and the rollout of the run in which it was logged."""

    step: int
    value: float
    rollout: int


@dataclass
class Series:
    """A metric's values.

    Attributes:
        first: of its first points, as many as say what is usual.
        points: the newest last.
    """

    first: list[float] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)

    def add(self, point: Point) -> None:
        """Add a point; steps that are done again take the place of those before."""
        while self.points and self.points[-1].step >= point.step:
            self.points.pop()
        self.points.append(point)
        del self.points[:-KEPT]
        if len(self.first) < BEFORE // 2:
            self.first.append(point.value)

    def last(self, count: int) -> list[Point]:
        """The newest points; empty where there are fewer."""
        return self.points[-count:] if len(self.points) >= count else []

    def before(self, count: int) -> list[float]:
        """What was usual before the newest `count` points; empty where too few say so."""
        values = [point.value for point in self.points[: len(self.points) - count]][-BEFORE:]
        return values if len(values) >= BEFORE // 2 else []


AllSeries = Mapping[str, Series]


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        metric: the metric that shows it.
        since: the first rollout that shows it.
        evidence: numbers by name.
    """

    metric: str
    since: int
    evidence: Mapping[str, float]


def high(series: AllSeries, metric: str, limit: float, count: int) -> Finding | None:
    """Whether the values of the last `count` rollouts are all at least `limit`; each of them must have one."""
    points = series.get(metric, Series()).last(count)
    if not points or points[-1].rollout - points[0].rollout >= count or min(point.value for point in points) < limit:
        return None
    newest = series[ROLLOUT].points[-1].rollout if ROLLOUT in series else points[-1].rollout
    if not newest <= points[-1].rollout < newest + count:  # generation may be ahead of what is trained on
        return None
    return Finding(metric, points[0].rollout, {metric: points[-1].value, "limit": limit})


def jumped(series: AllSeries, metric: str, thresholds: Jump) -> Finding | None:
    """Whether the last values are many times what was usual."""
    found = series.get(metric, Series())
    points, usual = found.last(thresholds.steps), found.before(thresholds.steps)
    if not (points and usual):
        return None
    median = statistics.median(map(abs, usual))
    limit = max(thresholds.factor * median, thresholds.at_least)
    if min(abs(point.value) for point in points) < limit:
        return None
    return Finding(metric, points[0].rollout, {metric: points[-1].value, "median before": median})


def _share(metric: str) -> Check:
    return lambda series, thresholds: high(series, metric, thresholds.share, thresholds.rollouts)


def _level(*metrics: str) -> Check:
    """A metric of these, or of those that begin with one that ends with "/"."""

    def check(series: AllSeries, thresholds: Level) -> Finding | None:
        named = [name for name in series if any(name == m or (m[-1] == "/" and name.startswith(m)) for m in metrics)]
        found = (high(series, name, thresholds.at_least, thresholds.rollouts) for name in sorted(named))
        return next(filter(None, found), None)

    return check


def _jump(*metrics: str) -> Check:
    return lambda series, limits: next(filter(None, (jumped(series, metric, limits) for metric in metrics)), None)


def entropy_collapse(series: AllSeries, thresholds: Collapse) -> Finding | None:
    """Whether the policy's entropy is a small part of what it began with."""
    metric = "train/entropy_loss"
    found = series.get(metric, Series())
    points = found.last(thresholds.steps)
    if not points or len(found.first) < BEFORE // 2:
        return None
    first = statistics.median(found.first)
    if max(point.value for point in points) >= min(thresholds.share * first, thresholds.below):
        return None
    return Finding(metric, points[0].rollout, {metric: points[-1].value, "at first": first})


def reward_falling(series: AllSeries, thresholds: Falling) -> Finding | None:
    """Whether the reward has lost much of the best that it had."""
    metric, count = "rollout/raw_reward", thresholds.rollouts
    points = series.get(metric, Series()).points
    if len(points) < 2 * count:
        return None
    values = [point.value for point in points]
    now = statistics.fmean(values[-count:])
    ends = range(count, len(values) - count + 1)
    best_end = max(ends, key=lambda end: statistics.fmean(values[end - count : end]))
    window = values[best_end - count : best_end]
    best, noise = statistics.fmean(window), statistics.pstdev(window) + statistics.pstdev(values[-count:])
    if best - now <= max(thresholds.share * abs(best), noise):
        return None
    return Finding(metric, points[best_end].rollout, {metric: now, "best before": best})


def reward_flat(series: AllSeries, thresholds: Flat) -> Finding | None:
    """Whether the reward has not moved for long, in a run that has something left to learn."""
    metric, count = "rollout/raw_reward", thresholds.rollouts
    points = series.get(metric, Series()).points[-2 * count :]
    groups = series.get("rollout/zero_std/fraction", Series()).points[-count:]
    if len(points) < 2 * count or (groups and statistics.fmean(point.value for point in groups) > 0.5):
        return None  # most prompts are solved, or none: `no_gradient` says so
    earlier, later = ([point.value for point in half] for half in (points[:count], points[count:]))
    error = (statistics.pvariance(earlier) + statistics.pvariance(later)) ** 0.5 / count**0.5
    if statistics.fmean(later) - statistics.fmean(earlier) > 2 * error:
        return None
    return Finding(metric, points[0].rollout, {metric: statistics.fmean(later), "before": statistics.fmean(earlier)})


def length_explosion(series: AllSeries, thresholds: Growth) -> Finding | None:
    """Whether responses are many times as long as at first."""
    metric = "rollout/response_len/mean"
    found = series.get(metric, Series())
    if len(found.first) < BEFORE // 2:
        return None
    first = statistics.median(found.first)
    limit = max(thresholds.factor * first, thresholds.at_least)
    finding = high(series, metric, limit, 3)
    return finding and Finding(metric, finding.since, {metric: finding.evidence[metric], "at first": first})


def slow_phase(series: AllSeries, thresholds: Jump) -> Finding | None:
    """Whether a phase took many times as long as it usually does."""
    phases = sorted(name for name in series if name.startswith("perf/") and name.endswith("_time"))
    found = (jumped(series, name, thresholds) for name in phases if name not in _SUMS)
    return next(filter(None, found), None)


def low_mfu(series: AllSeries, thresholds: Below) -> Finding | None:
    """Whether a GPU computes far less in training than it could; only where its peak is known."""
    metric = "perf/actor_train_mfu"
    points = series.get(metric, Series()).last(thresholds.rollouts)
    if not points or max(point.value for point in points) >= thresholds.share:
        return None
    return Finding(metric, points[0].rollout, {metric: points[-1].value, "limit": thresholds.share})


Check = Callable[[AllSeries, Any], Finding | None]
_SUMS = ("perf/step_time", "perf/other_time", "perf/train_time", "perf/train_wait_time")
"""Times in which phases are contained, or that wait for one: the phase itself says more."""


@dataclass(frozen=True)
class Rule:
    """An alarm.

    Attributes:
        what: what is wrong, in one sentence.
        check: (series, thresholds) -> finding.
        flags: to try, the likeliest first.
    """

    what: str
    check: Check
    flags: tuple[str, ...]


RULES: dict[str, Rule] = {
    "no_gradient": Rule(
        "half of the groups or more got one reward throughout: GRPO learns nothing from them",
        _share("rollout/zero_std/fraction"),
        ("--dynamic-sampling-filter-path", "--n-samples-per-prompt", "--rollout-temperature", "--prompt-data"),
    ),
    "truncated": Rule(
        "many responses are cut off by the length limit",
        _share("rollout/truncated_ratio"),
        ("--rollout-max-response-len", "--overlong-buffer-len"),
    ),
    "entropy_collapse": Rule(
        "the policy's entropy has collapsed: it tries nothing new",
        entropy_collapse,
        ("--entropy-coef", "--eps-clip-high", "--lr", "--rollout-temperature"),
    ),
    "engine_gap": Rule(
        "trainer and engine no longer agree on the same tokens",
        _jump("train/train_rollout_logprob_abs_diff"),
        ("--use-tis", "--use-rollout-routing-replay", "--max-weight-staleness", "--check-weight-update-equal"),
    ),
    "kl_spike": Rule(
        "the policy moved far in one step",
        _jump("train/ppo_kl", "train/kl_loss"),
        ("--lr", "--eps-clip", "--kl-loss-coef", "--global-batch-size"),
    ),
    "grad_spike": Rule(
        "the gradient is many times as large as it was", _jump("train/grad_norm"), ("--clip-grad", "--lr", "--use-tis")
    ),
    "reward_falling": Rule(
        "the reward falls", reward_falling, ("--lr", "--kl-loss-coef", "--use-kl-loss", "--max-weight-staleness")
    ),
    "reward_flat": Rule(
        "the reward does not move",
        reward_flat,
        ("--lr", "--n-samples-per-prompt", "--dynamic-sampling-filter-path", "--custom-rm-path"),
    ),
    "length_explosion": Rule(
        "responses are several times as long as at first",
        length_explosion,
        ("--overlong-buffer-len", "--rollout-max-response-len", "--loss-agg-mode"),
    ),
    "staleness": Rule(
        "samples are several weight syncs old when they are trained on",
        _level("rollout/weight_staleness/mean"),
        ("--max-weight-staleness", "--update-weights-interval", "--use-tis"),
    ),
    "failures": Rule(
        "samples fail in every rollout",
        _level(
            "rollout/sample_errors/",
            "rollout/reward_failures",
            "rollout/untrusted_retries",
            "rollout/dynamic_filter/drop_untrusted_reward",
            "rollout/tool_timeouts",
            "rollout/fully_async/crashed_groups",
        ),
        ("--on-sample-error", "--on-untrusted-reward", "--max-group-retries", "--tool-concurrency"),
    ),
    "untrusted_rewards": Rule(
        "environments or graders fail: many rewards are not trusted",
        _share("rollout/untrusted_reward"),
        (
            "--on-untrusted-reward",
            "--max-group-retries",
            "--rm-url",
            "--code-sandbox-concurrency",
            "--tool-concurrency",
        ),
    ),
    "engines_lost": Rule("engines were lost", _level("rollout/engines_lost"), ("--use-fault-tolerance",)),
    "aborts": Rule(
        "groups are aborted before they are done, and their tokens are lost",
        _level("rollout/aborted_ratio"),
        ("--partial-rollout", "--update-weights-interval", "--sglang-server-concurrency"),
    ),
    "slow_engine": Rule(
        "an engine serves requests far more slowly than the others",
        _level("rollout/engine_loads/slowest_ratio"),
        ("--sglang-server-concurrency",),
    ),
    "slow_rank": Rule(
        "a rank of the trainer is slower than the others, which wait for it",
        _level("perf/slowest_rank_ratio"),
        ("--balance-data", "--use-dynamic-batch-size"),
    ),
    "kv_full": Rule(
        "requests wait in engines whose KV cache is full",
        _level("rollout/engine_loads/full_ratio"),
        ("--sglang-mem-fraction-static", "--sglang-server-concurrency"),
    ),
    "drafts_lose": Rule(
        "engines accept fewer drafts than pays",
        _level("rollout/spec_break_even"),
        ("--spec-auto-off", "--enable-mtp-training", "--sglang-speculative-num-steps", "--spec-break-even-length"),
    ),
    "slow_phase": Rule(
        "a phase took many times as long as it usually does", slow_phase, ("--stall-timeout", "--use-pytorch-profiler")
    ),
    "low_mfu": Rule(
        "GPUs of the trainer mostly idle while they train",
        low_mfu,
        ("--max-tokens-per-gpu", "--use-dynamic-batch-size"),
    ),
}


def find(series: AllSeries, settings: AlarmSettings) -> dict[str, Finding]:
    """Return what is wrong at the newest step, by the alarm's name."""
    found = {}
    for name, rule in RULES.items():
        thresholds = getattr(settings, name)
        if thresholds.enabled and (finding := rule.check(series, thresholds)) is not None:
            found[name] = finding
    return found


def as_record(name: str, finding: Finding, rollout_id: int, *, has_ended: bool = False) -> dict[str, Any]:
    """Return an alarm as plain values, for `logging_utils.log_alarm`; it begins or ends at a rollout."""
    rule = RULES[name]
    numbers = ", ".join(f"{key} {short(value)}" for key, value in finding.evidence.items())
    link, flags = f"{DOCS}#{name}", ", ".join(rule.flags)
    what = f"{rule.what} ({numbers}), since rollout {finding.since}. Try {flags}; see {link}"
    if has_ended:
        what = f"over: {rule.what} (began at rollout {finding.since})"
    return {
        "name": name,
        "what": what,
        "state": "ended" if has_ended else "begun",
        "metric": finding.metric,
        "step": rollout_id,
        "since": finding.since,
        "evidence": dict(finding.evidence),
        "flags": list(rule.flags),
        "docs": link,
    }


class AlarmWatch:
    """Follows the records of a run.

    Args:
        settings: thresholds.
    """

    def __init__(self, settings: AlarmSettings) -> None:
        self._settings = settings
        self._series: dict[str, Series] = {}
        self._active: dict[str, Finding] = {}
        self._rollout = 0

    def note(self, metrics: Mapping[str, float], step_key: str) -> None:
        """Take one record."""
        step = int(metrics[step_key])
        if step_key == ROLLOUT:
            self._rollout = step
            self._series.setdefault(ROLLOUT, Series()).add(Point(step, step, step))
        for name, value in metrics.items():
            if name != step_key and value == value:  # NaN says nothing of a trend
                self._series.setdefault(name, Series()).add(Point(step, float(value), self._rollout))

    def changes(self, rollout_id: int) -> list[dict[str, Any]]:
        """Return the alarms that have begun or ended with a rollout, whose records are all noted."""
        found = find(self._series, self._settings)
        begun = [as_record(name, finding, rollout_id) for name, finding in found.items() if name not in self._active]
        ended = [
            as_record(name, old, rollout_id, has_ended=True) for name, old in self._active.items() if name not in found
        ]
        self._active = {name: self._active.get(name, finding) for name, finding in found.items()}
        return begun + ended
