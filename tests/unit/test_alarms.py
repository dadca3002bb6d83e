"""Alarms: each begins on a run that shows it and stays quiet on one that does not; thresholds by a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.config.alarm_settings import AlarmSettings, alarm_settings
from slime.config.parse import FLAG_CLASSES
from slime.config.parser import defaults_of
from slime.config.sglang.engine_flags import SglangFlags
from slime.observability import logging_utils
from slime.observability.alarms import DOCS, ROLLOUT, RULES, AlarmWatch
from slime.utils.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "fixtures" / "metrics"
DEFAULT = AlarmSettings()
STEADY = {
    "rollout/raw_reward": 0.5,
    "rollout/zero_std/fraction": 0.2,
    "rollout/truncated_ratio": 0.05,
    "rollout/response_len/mean": 200.0,
    "rollout/weight_staleness/mean": 1.0,
    "train/entropy_loss": 0.8,
    "train/grad_norm": 0.7,
    "train/ppo_kl": 0.001,
    "train/train_rollout_logprob_abs_diff": 0.01,
    "perf/update_weights_time": 3.0,
    "perf/actor_train_mfu": 0.3,
    "perf/slowest_rank_ratio": 1.1,
    "rollout/engine_loads/slowest_ratio": 1.2,
    "rollout/engine_loads/full_ratio": 0.1,
}


def run_of(count: int, **changes: Any) -> Iterator[dict[str, Any]]:
    """Records of `count` rollouts: steady, but for metrics whose value is a function of the rollout."""
    for rollout in range(count):
        values = STEADY | {name: of(rollout) for name, of in changes.items()}
        for step_key in ("rollout/step", "train/step"):
            family = step_key.partition("/")[0]
            mine = {name: v for name, v in values.items() if name.startswith("train/") == (family == "train")}
            yield {"step_key": step_key, "time": float(rollout), step_key: rollout, **mine}


def replay(records: Iterable[dict[str, Any]], settings: AlarmSettings) -> list[dict[str, Any]]:
    """The alarms of a run whose metrics.jsonl has these lines; lines that are no records of metrics are left out."""
    watch, alarms, rollout_id = AlarmWatch(settings), [], None
    for record in records:
        step_key = record.get("step_key", "")
        if step_key not in record or "alarm" in record:
            continue
        if step_key == ROLLOUT and rollout_id is not None and record[step_key] > rollout_id:
            alarms += watch.changes(rollout_id)
        if step_key == ROLLOUT:
            rollout_id = int(record[step_key])
        numbers = {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
        numbers.pop("time", None)
        watch.note(numbers, step_key)
    return alarms if rollout_id is None else alarms + watch.changes(rollout_id)


def begun(records: Iterator[dict[str, Any]], settings: AlarmSettings = DEFAULT) -> list[tuple[str, int]]:
    """(alarm, rollout since which it is so) of those that begin."""
    return [(alarm["name"], alarm["since"]) for alarm in replay(records, settings) if alarm["state"] == "begun"]


def from_rollout(start: int, metric: str, value: float) -> dict[str, Any]:
    """A metric that takes another value from a rollout on."""
    return {metric: lambda rollout: value if rollout >= start else STEADY.get(metric, 0.0)}


def test_a_steady_run_raises_no_alarm() -> None:
    assert begun(run_of(300, **{"rollout/raw_reward": lambda rollout: rollout / 300})) == []


@pytest.mark.parametrize(
    ("alarm", "metric", "value"),
    [
        ("no_gradient", "rollout/zero_std/fraction", 0.5),
        ("truncated", "rollout/truncated_ratio", 0.25),
        ("entropy_collapse", "train/entropy_loss", 0.01),
        ("engine_gap", "train/train_rollout_logprob_abs_diff", 0.06),
        ("kl_spike", "train/ppo_kl", -0.2),
        ("grad_spike", "train/grad_norm", 7.0),
        ("length_explosion", "rollout/response_len/mean", 600.0),
        ("staleness", "rollout/weight_staleness/mean", 4.0),
        ("failures", "rollout/sample_errors/mine", 2.0),
        ("failures", "rollout/reward_failures", 1.0),
        ("untrusted_rewards", "rollout/untrusted_reward", 0.1),
        ("engines_lost", "rollout/engines_lost", 1.0),
        ("slow_phase", "perf/update_weights_time", 61.0),
        ("low_mfu", "perf/actor_train_mfu", 0.09),
        ("aborts", "rollout/aborted_ratio", 0.3),
        ("slow_engine", "rollout/engine_loads/slowest_ratio", 2.5),
        ("slow_rank", "perf/slowest_rank_ratio", 1.6),
        ("kv_full", "rollout/engine_loads/full_ratio", 0.6),
        ("reward_falling", "rollout/raw_reward", 0.1),
    ],
)
def test_an_alarm_says_since_when(alarm: str, metric: str, value: float) -> None:
    found = dict(begun(run_of(60, **from_rollout(30, metric, value))))
    assert alarm in found and found[alarm] in ((30,) if alarm != "reward_falling" else range(1, 31))
    assert set(found) <= {alarm, "reward_flat"}


def test_a_number_just_below_a_threshold_is_no_alarm() -> None:
    for metric, value in (("rollout/zero_std/fraction", 0.49), ("rollout/truncated_ratio", 0.24)):
        assert begun(run_of(60, **from_rollout(30, metric, value))) == []


def test_one_bad_rollout_in_between_is_no_alarm_of_a_trend() -> None:
    assert begun(run_of(60, **{"rollout/truncated_ratio": lambda rollout: float(rollout % 3 == 0)})) == []


def test_what_differs_from_the_start_without_a_history_is_no_spike() -> None:
    assert begun(run_of(20, **{"train/grad_norm": lambda rollout: 1000.0 if rollout == 3 else 0.7})) == []


def test_a_reward_that_does_not_move_for_long_is_an_alarm_only_while_groups_differ() -> None:
    noise = {"rollout/raw_reward": lambda rollout: 0.3 + 0.01 * (rollout % 2)}
    assert begun(run_of(250, **noise)) == [("reward_flat", 0)]
    solved = {"rollout/zero_std/fraction": lambda rollout: 0.9}
    assert begun(run_of(250, **noise, **solved)) == [("no_gradient", 0)]


def test_an_alarm_ends_when_its_numbers_are_usual_again() -> None:
    bad = {"rollout/truncated_ratio": lambda rollout: 0.5 if 10 <= rollout < 20 else 0.0}
    alarms = replay(run_of(40, **bad), DEFAULT)
    assert [(alarm["name"], alarm["state"], alarm["step"]) for alarm in alarms] == [
        ("truncated", "begun", 14),  # the fifth rollout
        ("truncated", "ended", 20),
    ]
    first = alarms[0]
    assert first["evidence"] == {"rollout/truncated_ratio": 0.5, "limit": 0.25}
    assert first["docs"] == f"{DOCS}#truncated" and "--rollout-max-response-len" in first["what"]


def test_rollouts_that_are_done_again_do_not_count_twice() -> None:
    bad = list(run_of(4, **from_rollout(0, "rollout/truncated_ratio", 0.5)))
    assert begun(iter([*bad, *bad])) == []  # four rollouts, twice; five would raise it


def test_a_file_changes_thresholds(tmp_path: Path) -> None:
    path = tmp_path / "alarms.yaml"
    path.write_text("truncated: {share: 0.6}\nno_gradient: {enabled: false}\n")
    settings = alarm_settings(str(path))
    assert settings is not None and settings.truncated.rollouts == DEFAULT.truncated.rollouts
    bad = from_rollout(0, "rollout/truncated_ratio", 0.5) | from_rollout(0, "rollout/zero_std/fraction", 1.0)
    assert dict(begun(run_of(10, **bad))).keys() == {"truncated", "no_gradient"}
    assert begun(run_of(10, **bad), settings) == []
    assert alarm_settings("off") is None and alarm_settings(None) == DEFAULT


@pytest.mark.parametrize(
    "text",
    [
        "trunkated: {share: 1}",
        "truncated: {shares: 1}",
        "truncated: {share: -1}",
        "truncated: {rollouts: 401}",  # more than are remembered
        "reward_flat: {rollouts: 201}",
        "reward_falling: {rollouts: 201}",
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "alarms.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match="--alarms-config"):
        alarm_settings(str(path))


def test_every_alarm_has_thresholds_flags_that_exist_and_a_place_in_the_page() -> None:
    flags = {f"--{name.replace('_', '-')}" for group in (*FLAG_CLASSES, SglangFlags) for name in defaults_of(group)}
    flags |= {
        "--clip-grad",
        "--lr",
        "--sglang-server-concurrency",
        "--sglang-mem-fraction-static",
        "--sglang-speculative-num-steps",
    }  # Megatron's, SGLang's
    page = (ROOT / DOCS).read_text()
    assert list(AlarmSettings.model_fields) == list(RULES)
    for name, rule in RULES.items():
        assert set(rule.flags) <= flags, name
        assert f'<a id="{name}"></a>`{name}`' in page
    assert set(re.findall(r"--[a-z][a-z-]+", page)) <= flags | {"--alarms-config", "--ci-test"}


def test_a_run_writes_its_alarms_where_its_metrics_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.unit.test_observability import make_args

    logging_utils.init_tracking(make_args(tmp_path))
    for record in run_of(6, **from_rollout(0, "rollout/truncated_ratio", 0.5)):
        step_key = record["step_key"]
        metrics = {name: value for name, value in record.items() if name not in ("step_key", "time")}
        logging_utils.log(make_args(tmp_path), metrics, step_key)
        if step_key == "train/step":
            logging_utils.end_rollout(record[step_key])
    logging_utils.finish_tracking()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (alarm,) = [line for line in lines if "alarm" in line]
    assert (alarm["step_key"], alarm["rollout/step"]) == ("rollout/step", 4)
    assert (alarm["alarm"]["name"], alarm["alarm"]["since"]) == ("truncated", 0)
    assert "cut off by the length limit" in capsys.readouterr().out


def test_a_run_can_have_no_alarms(tmp_path: Path) -> None:
    from tests.unit.test_observability import make_args

    logging_utils.init_tracking(make_args(tmp_path, alarms_config="off"))
    for rollout in range(6):
        logging_utils.log(
            make_args(tmp_path), {"rollout/truncated_ratio": 1.0, "rollout/step": rollout}, "rollout/step"
        )
        logging_utils.end_rollout(rollout)
    logging_utils.finish_tracking()
    assert "alarm" not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("quick_start_sft", []),  # scripts/run-tiny-cpu.sh, its two runs
        ("quick_start", []),
        ("random_reward", ["truncated"]),  # with --rm-type random: the model runs into the length limit
        # train_async.py with weights of six rollouts ago and no correction, from a start that is right once in 40:
        ("stale_async", ["no_gradient", "staleness", "reward_falling"]),
        ("too_high_lr", ["no_gradient", "truncated"]),  # with --lr 3e-2: nothing is right any more
    ],
)
def test_recorded_runs_raise_the_alarms_that_they_deserve(run: str, expected: list[str]) -> None:
    records = [json.loads(line) for line in (RECORDED / f"{run}.jsonl").read_text().splitlines()]
    assert [name for name, _ in begun(iter(records))] == expected


def with_errors(rollouts: set[int], count: int = 12) -> Iterator[dict[str, Any]]:
    """A steady run in which samples of these rollouts fail: the metric is logged in these alone."""
    for record in run_of(count):
        failed = record["step_key"] == "rollout/step" and record["rollout/step"] in rollouts
        yield record | ({"rollout/sample_errors/timeout": 2.0} if failed else {})


def test_failures_now_and_then_are_not_failures_in_each_rollout() -> None:
    assert begun(with_errors({0, 2, 4, 6, 8, 10})) == []
    assert begun(with_errors({3, 4, 5, 6, 7})) == [("failures", 3)]


def test_failures_that_are_not_logged_any_more_are_over() -> None:
    alarms = replay(with_errors({3, 4, 5, 6, 7}), DEFAULT)
    assert [(alarm["state"], alarm["step"]) for alarm in alarms] == [("begun", 7), ("ended", 8)]


def test_generation_may_be_a_rollout_ahead_of_training() -> None:
    records = []
    for rollout in range(10):
        ahead = {"rollout/step": rollout + 1, "rollout/sample_errors/timeout": 2.0}
        records += [{"step_key": "rollout/step", "time": 0.0, **ahead}]
        records += [{"step_key": "rollout/step", "time": 0.0, "rollout/step": rollout, "perf/step_time": 1.0}]
    watch = AlarmWatch(DEFAULT)
    found = []
    for record in records:
        watch.note({name: value for name, value in record.items() if "/" in name}, "rollout/step")
        if "perf/step_time" in record:
            found += watch.changes(record["rollout/step"])
    assert [(alarm["name"], alarm["state"], alarm["since"]) for alarm in found] == [("failures", "begun", 1)]
