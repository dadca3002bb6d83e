"""The curves of a run, and the timers whose times they show."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from slime.observability import console
from slime.observability.timer import Timer, inverse_timer, timer, with_defer


def test_of_a_step_logged_twice_the_later_value_is_drawn(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step_key": "eval/step", "eval/step": 1, "eval/a": value} for value in (0.1, 0.2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"cut sho')
    assert console.read_series(path) == {"eval/a": {1: 0.2}}


def test_damaged_lines_inside_a_file_are_left_out_and_counted_once(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    row = json.dumps({"step_key": "train/step", "train/step": 1, "train/loss": 2.0}) + "\n"
    path.write_bytes(b'{"cut sho\n[1]\n\xff\n\n' + row.encode())
    assert console.read_series(path) == {"train/loss": {1: 2.0}}
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} has 3 lines that hold no record; they are left out"
    ]


GRPO_SERIES = {
    "rollout/raw_reward": {0: 0.25, 1: 0.5},
    "rollout/dropped_ratio": {0: 0.1, 1: 0.2},
    "eval/addition": {0: 0.5},
    "eval/addition-truncated_ratio": {0: 0.5},
    "eval/addition/truncated_ratio": {0: 0.5},
    "eval/math-500": {0: 0.25},
    "eval/math-500-pass@4": {0: 0.5},
    "train/loss": {0: 0.0},
    "train/pg_loss": {0: 0.0},
    "train/entropy_loss": {0: 0.7},
    "train/kl_loss": {0: 0.1},
    "train/pg_clipfrac": {0: 0.0},
    "train/critic-value_loss": {0: 0.3},
    "perf/step_time": {0: 60.0, 1: 2.0, 2: 3.0, 3: 2.0},
    "perf/actor_train_time": {0: 1.0, 1: 1.0, 2: 1.0},
}


def test_curves_have_panels_for_what_was_logged_with_legends_in_words():
    panels = {panel.title: panel for panel in console.select_panels(GRPO_SERIES)}
    assert list(panels) == [
        *["reward", "evaluation", "shares of a rollout", "entropy", "KL", "clipped tokens (share)", "value loss"],
        "seconds a rollout",
    ]
    assert (
        panels["evaluation"].curves == {"addition": {0: 0.5}, "math-500": {0: 0.25}}
        and panels["evaluation"].unit == "rollouts trained"
    )
    assert panels["shares of a rollout"].curves == {"dropped groups": {0: 0.1, 1: 0.2}}
    assert not any("/" in label for panel in panels.values() for label in panel.curves)


def test_curves_of_sft_show_the_loss_and_no_reward_or_evaluation():
    series = {"rollout/raw_reward": {0: 0.0}, "rollout/response_len/mean": {0: 3.0}, "train/loss": {0: 4.8, 1: 4.0}}
    assert [panel.title for panel in console.select_panels(series)] == ["loss", "response length (tokens)"]


def test_the_start_of_a_run_does_not_flatten_the_times_of_its_steps():
    times = {panel.title: panel for panel in console.select_panels(GRPO_SERIES)}["seconds a rollout"].curves
    # Step 0 took 60 s, more than four times the median of 2.5 s; the longest of the others took 3 s.
    assert console.upper_limit(times) == pytest.approx(1.1 * 3)
    assert console.upper_limit({"all": {0: 0.0}}) > 0


def test_a_run_without_curves_draws_nothing(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step_key": "train/step", "train/step": 1, "train/odd": 1.0}) + "\n")
    assert console.write_curves(path, tmp_path / "curves.png") is False


def test_timers_sum_what_blocks_and_functions_take():
    Timer().reset()

    @timer
    def work() -> int:
        time.sleep(0.01)
        return 5

    with timer("waiting"):
        assert work() + work() == 10
        with inverse_timer("waiting"):
            assert not Timer().is_running("waiting")
    sums = Timer().log_dict()
    assert 0.02 <= sums["work"] <= sums["waiting"]
    Timer().reset()
    assert Timer().log_dict() == {}


def test_a_timer_started_twice_is_refused():
    Timer().start("twice")
    with pytest.raises(ValueError, match="twice"):
        Timer().start("twice")
    Timer().end("twice")


def test_deferred_work_is_done_also_after_an_error():
    calls: list[int] = []

    @with_defer(lambda: calls.append(1))
    def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        fails()
    assert calls == [1]
