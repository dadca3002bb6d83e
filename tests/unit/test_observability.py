"""Sinks, timers and curves: what a run leaves behind and what it shows while it runs."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.observability import console, logging_utils
from slime.observability.console import ConsoleSink, jump
from slime.observability.logging_utils import (
    collect_warnings,
    finish_tracking,
    init_tracking,
    log,
    log_eval_samples,
    take_pending,
)
from slime.observability.tensorboard_utils import tensorboard_dir
from slime.observability.trackers import writer
from slime.utils.errors import UsageError
from tests.unit.tracker_fakes import WriterHere


def make_args(output_dir: Path, **changes: object) -> Namespace:
    values = {
        "output_dir": str(output_dir),
        "alarms_config": None,
        "save": None,
        "load": None,
        "finetune": False,
        "use_wandb": False,
        "tracker": [],
        "use_tensorboard": False,
        "tb_project_name": None,
        "tb_experiment_name": None,
        "wandb_mode": "offline",
        "wandb_dir": None,
        "wandb_key": "a secret",
        "wandb_host": None,
        "wandb_team": None,
        "wandb_group": "g",
        "wandb_project": "p",
        "wandb_random_suffix": True,
        "wandb_run_id": None,
        "wandb_always_use_train_step": False,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "global_batch_size": 4,
        "ppo_epochs": 1,
    }
    return Namespace(**(values | changes))


@pytest.fixture(autouse=True)
def no_tracking_is_left_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging_utils, "TrackerWriter", WriterHere)
    monkeypatch.setattr(writer, "POLL_S", 0.01)
    yield
    finish_tracking()
    take_pending()


def run_of_two_steps(args: Namespace) -> None:
    init_tracking(args)
    log(args, {"eval/step": 0, "eval/addition": 0.25}, "eval/step")
    for step in (0, 1):
        log(args, {"rollout/step": step, "rollout/raw_reward": 0.5, "rollout/response_len/mean": 3.0}, "rollout/step")
        log(args, {"train/step": step, "train/loss": 0.125}, "train/step")
        log(args, {"rollout/step": step, "perf/step_time": 1.5}, "rollout/step")
    finish_tracking()


def test_every_record_is_a_json_line_with_its_step_key_and_time(tmp_path: Path):
    before = time.time()
    run_of_two_steps(make_args(tmp_path))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step_key"] for r in records] == ["eval/step", *["rollout/step", "train/step", "rollout/step"] * 2]
    assert records[0]["eval/addition"] == 0.25
    assert all(before <= r["time"] <= time.time() for r in records)


def test_a_second_run_in_the_same_directory_appends(tmp_path: Path):
    for _ in range(2):
        run_of_two_steps(make_args(tmp_path))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2 * 7


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_output_dir_costs_records_and_says_so_once_and_not_the_run(tmp_path: Path, caplog, monkeypatch):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount")
    try:
        args, filler = make_args(small), small / "filler"
        init_tracking(args)
        filler.write_bytes(bytes(40_000))
        for step in range(600):  # a page of the file is half full when the disk is
            log(args, {"train/step": step, "train/loss": 0.125, "train/other": 0.5}, "train/step")
        shown: Any = [{"data_set": "d", "prompt": "p" * 40_000, "response": "r"}]
        log_eval_samples(shown, 3)
        filler.unlink()
        log(args, {"train/step": 600, "train/loss": 0.125}, "train/step")
        log_eval_samples([{**shown[0], "prompt": "p"}], 4)
        finish_tracking()
        steps = [json.loads(line)["train/step"] for line in (small / "metrics.jsonl").read_text().splitlines()]
        assert steps == [*range(len(steps) - 1), 600] and 10 < len(steps) < 600, "whole lines, without a hole"
        assert len((small / "eval_samples.jsonl").read_text().splitlines()) == 1
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)
    said = [record.getMessage() for record in caplog.records if "metrics.jsonl" in record.getMessage()]
    assert len(said) == 2 and "No space left on device" in said[0]
    assert f"lacks {601 - len(steps)} lines" in said[1] and "it is written again" in said[1]


def test_the_end_of_a_run_leaves_a_png(tmp_path: Path):
    run_of_two_steps(make_args(tmp_path))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_value_that_is_not_finite_is_null(tmp_path: Path):
    args = make_args(tmp_path)
    init_tracking(args)
    log(args, {"train/step": 0, "train/loss": math.nan}, "train/step")
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["train/loss"] is None


def test_a_process_that_is_not_primary_only_collects(tmp_path: Path):
    args = make_args(tmp_path)
    init_tracking(args, primary=False)
    log(args, {"rollout/step": 3, "rollout/x": 1.0}, "rollout/step")
    assert take_pending() == [({"rollout/step": 3, "rollout/x": 1.0}, "rollout/step")]
    assert take_pending() == [] and not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("metrics", [{"train/loss": 1.0}, {"train/step": 0, "train/loss": "high"}])
def test_a_record_without_its_step_or_with_text_is_refused(tmp_path: Path, metrics: dict):
    with pytest.raises(ValueError, match="train/"):
        log(make_args(tmp_path), metrics, "train/step")


def test_tensors_of_one_element_become_numbers(tmp_path: Path):
    import torch

    log(make_args(tmp_path), {"train/step": 0, "train/loss": torch.tensor(0.5)}, "train/step")
    assert take_pending() == [({"train/step": 0, "train/loss": 0.5}, "train/step")]


def test_a_jump_of_the_gap_between_trainer_and_engine_is_marked_on_its_line():
    lines: list[str] = []
    sink = ConsoleSink(lines.append)
    for step, gap in enumerate([2e-7, 2e-7, 2e-7, 1.9e-5, 0.17]):
        sink.write({"train/step": step, "train/train_rollout_logprob_abs_diff": gap}, "train/step")
        sink.end_rollout(step)
    assert [("(!)" in line) for line in lines] == [False, False, False, False, True]
    assert f"|train-engine| is {0.17 / 2e-7:.2g}x its median: see docs/debugging.md" in lines[-1]


@pytest.mark.parametrize(
    ("value", "earlier", "ratio"),
    [
        (1.0, [0.01, 0.01, 0.01], 1.0 / 0.01),
        (0.99, [0.01, 0.01, 0.01], None),
        (1.0, [0.01, 0.01], None),  # a median of two rollouts says little
        (1.0, [0.0, 0.0, 0.0], 2.0**23),  # bit for bit equal before
        (2.0**-20, [0.0, 0.0, 0.0], None),  # a few roundings of float32
        (1.0, [0.001, 0.5, 0.5], None),
        (1.0, [math.nan, 0.01, 0.01, 0.01], 1.0 / 0.01),
        (math.nan, [0.01, 0.01, 0.01], None),
    ],
)
def test_a_jump_is_a_hundred_times_the_running_median(value: float, earlier: list[float], ratio: float | None):
    assert jump(value, earlier) == (None if ratio is None else pytest.approx(ratio))


def test_tensorboard_gets_the_scalars_at_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tb"))
    run_of_two_steps(make_args(tmp_path, use_tensorboard=True))
    events = event_accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(0, 0.125), (1, 0.125)]


ANSWERS = [
    {"data_set": name, "prompt": f"{name}?", "response": "42", "label": 42, "reward": 0.5, "truncated": False}
    for name in ("a", "b")
]


def test_answers_of_an_evaluation_are_json_lines_beside_the_metrics(tmp_path: Path):
    init_tracking(make_args(tmp_path))
    for step in (0, 3):
        log_eval_samples(ANSWERS, step)
    rows = [json.loads(line) for line in (tmp_path / "eval_samples.jsonl").read_text().splitlines()]
    assert rows == [{"eval/step": step, **answer} for step in (0, 3) for answer in ANSWERS]


def test_without_answers_to_show_no_file_is_written(tmp_path: Path):
    init_tracking(make_args(tmp_path))
    log_eval_samples([], 0)
    assert not (tmp_path / "eval_samples.jsonl").exists()


def test_tensorboard_shows_answers_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tb"))
    init_tracking(make_args(tmp_path, use_tensorboard=True))
    log_eval_samples(ANSWERS, 3)
    finish_tracking()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    (event,) = events.Tensors("eval/b/samples/1/text_summary")
    assert event.step == 3
    assert event.tensor_proto.string_val[0].decode() == "    b?\n    \n    42\n    \n    reward 0.5"


def test_wandb_shows_answers_as_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    init_tracking(make_args(tmp_path, use_wandb=True))
    log_eval_samples(ANSWERS, 3)
    finish_tracking()
    tables = [json.loads(path.read_text()) for path in sorted((tmp_path / "wandb").rglob("*.table.json"))]
    assert sorted(table["data"] for table in tables) == [[[f"{s}?", "42", "42", 0.5, False]] for s in ("a", "b")]


def test_tensorboard_without_a_directory_names_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    with pytest.raises(UsageError, match="--tb-project-name"):
        tensorboard_dir(make_args(tmp_path))


def test_tensorboard_files_are_in_a_directory_of_their_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    assert tensorboard_dir(make_args(tmp_path, tb_project_name="p", tb_experiment_name="e")) == Path("p/e")
    unnamed = tensorboard_dir(make_args(tmp_path, tb_project_name="p"))
    assert unnamed.parent == Path("p") and unnamed.name.startswith(time.strftime("%Y")), "its name is the time"
    monkeypatch.setenv("TENSORBOARD_DIR", "env")
    assert tensorboard_dir(make_args(tmp_path)) == Path("env")
    assert tensorboard_dir(make_args(tmp_path, tb_experiment_name="e")) == Path("env/e")
    assert tensorboard_dir(make_args(tmp_path, tb_project_name="p", tb_experiment_name="e")) == Path("p/e")


def test_warnings_of_a_block_are_collected_for_another_process() -> None:
    logger = logging.getLogger("slime.backends.some_module")
    logger.warning("before")
    with collect_warnings() as collected:
        logger.info("no warning")
        logger.warning("%s holds no optimizer state", "out/iter_0000003")
        logging.getLogger("megatron").warning("not ours")
    logger.warning("after")
    assert collected == ["out/iter_0000003 holds no optimizer state"]


def test_an_alarm_is_a_line_of_the_metrics_and_of_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    init_tracking(make_args(tmp_path))
    alarm = {"what": "half of the groups have no gradient", "since": 3, "flags": ["--n-samples-per-prompt"]}
    logging_utils.log_alarm(alarm)
    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert line["step_key"] == "alarm" and line["alarm"] == alarm
    assert "(!) half of the groups have no gradient" in capsys.readouterr().out
    finish_tracking()
    assert console.read_series(tmp_path / "metrics.jsonl") == {}, "it is not a metric"
