"""The console's line of a rollout, of an evaluation, and what a run says of itself where there is no terminal."""

from __future__ import annotations

import itertools
import os

import pytest

from slime.observability.console import WIDTH, ConsoleSink, eval_line, rollout_line
from slime.observability.phases import Phases, RunStatus
from slime.processes.progress import counts_under_way, progress_bar
from slime.processes.wait import wait
from slime.ray import utils

GENERATION = {
    "rollout/response_len/mean": 212.4,
    "rollout/truncated_ratio": 0.0,
    "rollout/dropped_ratio": 0.08,
    "perf/tokens_per_gpu_per_sec": 4234.0,
}
GRPO = GENERATION | {
    "rollout/raw_reward": 0.61,
    "train/loss": 0.0,
    "train/pg_loss": 0.0,
    "train/pg_clipfrac": 0.0,
    "train/kl_loss": 0.0031,
    "train/entropy_loss": 0.41,
    "train/grad_norm": 0.52,
    "train/train_rollout_logprob_abs_diff": 2.4e-4,
}


def line_of(values, **changes) -> str:
    return rollout_line(values, **({"rollout_id": 12, "last_id": 69, "took_s": 12.34, "left_s": 840.0} | changes))


def test_the_line_of_a_rollout_names_every_figure_and_fits_120_columns():
    line = line_of(GRPO, before=GRPO | {"rollout/raw_reward": 0.59})
    assert line == (
        "rollout 12/69 reward 0.610 (+0.020) len 212 drop 8% kl 0.0031 ent 0.41 |t-e| 2.4e-4 4.2k tok/s "
        "12.3 s eta 14 min"
    )
    assert len(line) <= WIDTH == 120 < len(f"{line} grad 0.52")
    assert " grad 0.52 4.2k tok/s" in line_of(GRPO), "there is room without the change of the reward"


def test_ppo_shows_the_value_loss_and_gives_up_the_least_needed_figures_to_fit():
    ppo = GRPO | {"train/critic-value_loss": 0.123, "train/pg_clipfrac": 0.02, "rollout/truncated_ratio": 0.25}
    line = line_of(ppo, before=GRPO, last_id=123_456, rollout_id=100_000)
    assert "vloss 0.12" in line and "grad" not in line and "trunc" not in line and len(line) <= WIDTH
    assert "len 212 trunc 25% drop 8%" in line_of(ppo) and "tok/s" not in line_of(ppo)
    assert "clip 2%" in line_of({name: ppo[name] for name in ("train/pg_loss", "train/pg_clipfrac")})


def test_sft_shows_its_loss_and_no_reward():
    of_demonstrations = {
        "rollout/raw_reward": 0.0,
        "rollout/response_len/mean": 3.5,
        "train/loss": 4.8005,
        "perf/tokens_per_gpu_per_sec": 9e9,
        "perf/actor_train_tok_per_gpu_per_sec": 8149.0,
    }
    assert line_of(of_demonstrations, left_s=None) == "rollout 12/69 loss 4.8005 len 3.5 8.1k tok/s 12.3 s"


def test_the_loss_of_a_policy_is_not_shown_and_what_is_not_measured_neither():
    line = line_of({"train/loss": 0.0, "train/pg_loss": 0.0, "rollout/raw_reward": -0.25})
    assert line == "rollout 12/69 reward -0.250 12.3 s eta 14 min"
    assert rollout_line({}, rollout_id=3, last_id=9) == "rollout 3/9"


def test_marks_stand_at_the_end_of_the_line():
    assert line_of({}, marks=["|t-e| is 130 times as large as before"]).endswith(
        "eta 14 min |t-e| is 130 times as large as before"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (2.7e-7, "2.7e-7"), (0.0031, "0.0031"), (4.83, "4.8"), (212.4, "212"), (1234.0, "1.2k"),
     (123_456.0, "123k"), (2e6, "2.0M"), (float("nan"), "nan")],
)  # fmt: skip
def test_a_figure_has_two_or_three_digits(value: float, text: str):
    assert f" ent {text} " in line_of({"train/entropy_loss": value})


def test_an_evaluation_is_numbered_by_the_rollouts_before_it_and_many_sets_take_several_lines():
    assert eval_line({"eval/step": 0, "eval/a": 0.5}) == "eval 0 (before training) a 0.500"
    found = {"eval/step": 8, "eval/a": 0.75, "eval/a/truncated_ratio": 1.0, "eval/a-truncated_ratio": 1.0}
    assert eval_line(found | {"eval/a-pass@4": 1.0}) == "eval 8 (after rollout 7) a 0.750 a-pass@4 1.000"
    hyphens = {"eval/step": 1, "eval/math-500": 0.5, "eval/math-500-truncated_ratio": 0.1, "eval/a-failed_samples": 2}
    assert eval_line(hyphens) == "eval 1 (after rollout 0) math-500 0.500"
    many = {f"eval/set-{number}-pass@1": 0.5 for number in range(20)}
    lines = eval_line({"eval/step": 8} | many).split("\n")
    assert len(lines) > 1 and max(map(len, lines)) <= WIDTH and all(line.startswith("    ") for line in lines[1:])
    assert "".join(lines).count("-pass@1 0.500") == 20


def sink_and_lines(*times: float) -> tuple[ConsoleSink, list[str]]:
    lines: list[str] = []
    return ConsoleSink(lines.append, clock=iter([0.0, *times]).__next__), lines


def test_a_rollout_has_one_line_with_the_means_of_its_train_steps_and_the_time_that_is_left():
    sink, lines = sink_and_lines(10.0, 12.0, 16.0)
    sink.write({"rollout/step": 0, "perf/update_weights_time": 1.0}, "rollout/step")
    sink.write({"eval/step": 0, "eval/a": 0.5}, "eval/step")
    sink.begin(last_id=3)
    for rollout_id, reward in ((0, 0.25), (1, 0.5)):
        sink.write({"rollout/step": rollout_id, "rollout/response_len/mean": 3.25}, "rollout/step")
        sink.write({"rollout/step": rollout_id, "rollout/raw_reward": reward}, "rollout/step")
        for step, entropy in ((0, 0.2), (1, 0.6)):
            metrics = {"train/step": 2 * rollout_id + step, "train/pg_loss": 0.0, "train/entropy_loss": entropy}
            sink.write(metrics, "train/step")
        sink.end_rollout(rollout_id)
        sink.write({"rollout/step": rollout_id, "perf/save_model_time": 2.0}, "rollout/step")
    # Rollout 0 took 2 s; with rollout 1, which took 4 s, the mean is 3 s; the entropy is that of both steps.
    assert lines == [
        "eval 0 (before training) a 0.500",
        "rollout 0/3 reward 0.250 len 3.2 ent 0.4 2.0 s eta 6 s",
        "rollout 1/3 reward 0.500 (+0.250) len 3.2 ent 0.4 4.0 s eta 6 s",
    ]


def test_what_was_measured_behind_a_rollout_is_not_shown_with_the_next():
    sink, lines = sink_and_lines(0.0, 1.0, 2.0)
    sink.begin(last_id=1)
    sink.write({"rollout/step": 0, "rollout/raw_reward": 0.5, "rollout/response_len/mean": 3.0}, "rollout/step")
    sink.end_rollout(0)
    sink.write({"rollout/step": 0, "rollout/response_len/mean": 9.0}, "rollout/step")
    sink.write({"rollout/step": 1, "rollout/raw_reward": 0.5}, "rollout/step")
    sink.end_rollout(1)
    assert lines[1] == "rollout 1/1 reward 0.500 (+0.000) 1.0 s"


class Hands:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_the_start_says_every_ten_seconds_and_later_every_minute_what_it_waits_for():
    clock, said = Hands(), []
    phases = Phases(clock)
    status = RunStatus(phases, lambda: [], said.append, lambda _: "engine_0.log: capturing")
    with phases.enter("start"):
        status.announce("connecting to Ray")
        for clock.now in range(6):
            status.look()
        status.announce("starting engines")
        for clock.now in range(6, 190):
            status.look()
    assert said == [
        "connecting to Ray",
        "starting engines",
        *(f"starting engines: {s} s so far" for s in (10, 20, 30, 40, 50)),
        *(f"starting engines: {time} so far; engine_0.log: capturing" for time in ("60 s", "2 min", "3 min")),
    ]


def test_without_a_terminal_a_long_rollout_says_every_minute_how_far_it_is():
    clock, said, done = Hands(), [], itertools.count()
    phases = Phases(clock)
    status = RunStatus(phases, lambda: [("rollout 3", next(done), 512)], said.append)
    for _ in range(2):
        begin = int(clock.now)
        with phases.enter("generate"):
            for clock.now in range(begin, begin + 70):
                status.look()
    assert said == ["rollout 3 0/512: 60 s so far", "rollout 3 1/512: 60 s so far"]


def test_a_start_whose_news_cannot_be_read_says_how_long_it_lasts():
    clock, said = Hands(), []
    phases = Phases(clock)
    status = RunStatus(phases, lambda: [], said.append, lambda seconds: 1 / 0)
    with phases.enter("start"):
        status.announce("starting engines")
        clock.now = 61
        status.look()
    assert said == ["starting engines", "starting engines: 61 s so far"]


def test_a_count_that_cannot_be_read_costs_only_the_count():
    clock, said = Hands(), []
    phases = Phases(clock)
    status = RunStatus(phases, lambda: 1 / 0, said.append)
    with phases.enter("train"):
        clock.now = 61
        status.look()
    assert said == ["train: 61 s so far"]


def test_work_is_counted_while_it_is_under_way():
    with progress_bar(3, "rollout 0") as bar:
        bar.update()
        bar.update(0)
        with progress_bar(5, "eval a"):
            assert counts_under_way() == [("rollout 0", 1, 3), ("eval a", 0, 5)]
        assert counts_under_way() == [("rollout 0", 1, 3)]
    assert counts_under_way() == []


def test_the_driver_reads_the_counts_of_the_process_that_generates(monkeypatch: pytest.MonkeyPatch):
    table: dict[bytes, bytes] = {}
    monkeypatch.setenv("SLIME_RUN_ID", "a run")
    monkeypatch.setattr(utils, "POLL_S", 0.01)
    monkeypatch.setattr(utils.internal_kv, "_internal_kv_get", table.get)
    monkeypatch.setattr(
        utils.internal_kv, "_internal_kv_put", lambda key, value, overwrite: table.update({key: value})
    )
    assert utils.progress_of("a run", utils.MANAGER) == {}, "it has not published yet"
    with progress_bar(8, "rollout 3") as bar:
        bar.update(5)
        utils.publish_progress(utils.MANAGER, lambda: {"under_way": [list(count) for count in counts_under_way()]})
        said = wait("the counts", 10, lambda: utils.progress_of("a run", utils.MANAGER) or None, interval_s=0.01)
    assert said["under_way"] == [["rollout 3", 5, 8]] and said["pid"] == os.getpid()
