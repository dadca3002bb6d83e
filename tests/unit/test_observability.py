"""Sinks, timers and curves: what a run leaves behind and what it shows while it runs."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import re
import subprocess
import sys
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.checkpoints.paths import TRACKER_FILE
from slime.observability import console, logging_utils, wandb_utils
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
from slime.observability.trackers import Step, TrackedRun, client, writer
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


def test_wandb_offline_writes_a_run_with_no_key_in_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    args = make_args(tmp_path, use_wandb=True)
    assert wandb_utils.public_config(args)["wandb_key"] == "***"
    run_of_two_steps(args)
    (run_file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = run_file.read_bytes()
    assert b"train/loss" in content and b"eval/addition" in content and b"a secret" not in content


def test_wandb_offline_writes_the_command_line_without_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    flags = {"wandb_key": "key-of-wandb", "sglang_api_key": "key-of-engines", "reward": {"api_key": "key-in-json"}}
    line = ["train.py", "--lr", "0.000017", "--wandb-key", "key-of-wandb", "--sglang-api-key=key-of-engines"]
    line += ["--sglang-api-k", "key-of-engines", "--reward", '{"api_key": "key-in-json"}', "--wandb-key=key-before"]
    monkeypatch.setattr(sys, "argv", line)
    run_of_two_steps(make_args(tmp_path, use_wandb=True, **flags))
    assert sys.argv is line
    content = b"".join(path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file())
    assert b"0.000017" in content and b"--sglang-api-key=***" in content, "the command line is there"
    assert re.findall(rb"key-(?:of|in|before)[a-z-]*", content) == []


def test_a_wandb_whose_process_hangs_ends_and_the_error_says_how_to_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "1")
    args = make_args(tmp_path, use_wandb=True)
    # In a process of its own, with a wandb-core of its own: this one's serves other tests.
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        directory, said = pool.submit(finish_with_a_stopped_service, args).result(timeout=170)
    assert said.startswith("not all was uploaded") and said.endswith(f"wandb sync {directory}")
    assert str(tmp_path) in directory and Path(directory).is_dir()


def finish_with_a_stopped_service(args: Namespace) -> tuple[str, str]:
    """(where the run is, what is raised) where W&B's process is stopped meanwhile."""
    wandb_utils.MARGIN_S = 1.0
    adapter = wandb_utils.WandbAdapter(args)
    adapter.open({}, TrackedRun(Path(args.output_dir)))
    adapter.log({"train/step": 0, "train/loss": 1.0}, Step("train/step", 0, 0.0))
    (service,) = [child for child in psutil.Process().children() if child.name() == wandb_utils.SERVICE]
    service.suspend()
    try:
        adapter.finish({"status": "finished"})
    except TimeoutError as error:
        return adapter.run.settings.sync_dir, str(error)
    return adapter.run.settings.sync_dir, "it ended well"


def test_wandb_is_given_a_deadline_for_its_uploads(wandb_asked, monkeypatch: pytest.MonkeyPatch):
    asked = wandb_asked()[1]["settings"]
    assert (asked["finish_timeout"], asked["finish_timeout_raises"]) == (300.0, True)
    assert asked["console"] == "off", "it would be that of the trackers' process"
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "20")
    assert wandb_asked()[1]["settings"]["finish_timeout"] == 20.0, "that of the user's"
    for given in ("soon", "0", "inf"):
        monkeypatch.setenv("WANDB_FINISH_TIMEOUT", given)
        with pytest.raises(UsageError, match=f"WANDB_FINISH_TIMEOUT={given}: give the seconds"):
            wandb_asked()


class FakeWandb:
    """In the place of the package: writes down what it is asked for."""

    def __init__(self) -> None:
        self.logins: list[dict] = []
        self.run: dict = {}
        self.axes: dict[str, str | None] = {}

    def login(self, **keywords: object) -> None:
        self.logins.append(keywords)

    def init(self, **keywords: object) -> Namespace:
        self.run = keywords

        def define_metric(name: str, step_metric: str | None = None) -> None:
            self.axes[name] = step_metric

        name = keywords["id"] or "made up"
        return Namespace(define_metric=define_metric, log=lambda data: None, id=name, url=f"https://wandb/{name}")

    def teardown(self) -> None:
        """No service is there."""


@pytest.fixture
def wandb_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What W&B is asked for under some flags: (its logins, the keywords of its run)."""

    def start(**flags: object) -> tuple[list[dict], dict]:
        fake = FakeWandb()
        monkeypatch.setitem(sys.modules, "wandb", fake)
        args = make_args(tmp_path, use_wandb=True, **flags)
        client.prepare(args, ["wandb"])
        facts = writer.read_run(tmp_path)
        facts.args.wandb_key = args.wandb_key  # it travels in the environment
        said: list[str] = []
        adapter = wandb_utils.WandbAdapter(args)
        lane = writer.Lane("wandb", facts, lambda kind, text: said.append(text))
        monkeypatch.setattr(writer, "make_tracker", lambda name, args: adapter)
        lane.deliver()
        assert not [text for text in said if "does not work" in text], said
        return fake.logins, fake.run

    return start


def test_wandb_draws_a_users_metric_over_the_step_of_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    args = make_args(tmp_path, use_wandb=True)
    adapter = wandb_utils.WandbAdapter(args)
    adapter.open({}, TrackedRun(tmp_path))
    adapter.log({"mine/x": 1.0, "alone": 2.0, "rollout/y": 3.0, "rollout/step": 4}, Step("rollout/step", 4, 0.0))
    assert fake.axes["mine/x"] == fake.axes["alone"] == "rollout/step"
    assert "rollout/y" not in fake.axes, "its family has an axis"


@pytest.mark.parametrize(
    ("flag", "value", "keyword"),
    [
        ("wandb_mode", "disabled", "mode"),
        ("wandb_team", "t", "entity"),
        ("wandb_project", "other", "project"),
        ("wandb_group", "other", "group"),
        ("wandb_run_id", "r", "id"),
    ],
)
def test_a_wandb_flag_is_a_keyword_of_the_run(wandb_asked, flag: str, value: str, keyword: str):
    (_, default), (_, run) = wandb_asked(), wandb_asked(**{flag: value})
    assert run[keyword] == value != default[keyword]


def test_wandb_goes_on_with_a_run_that_is_named(wandb_asked):
    assert wandb_asked()[1]["resume"] is None
    assert wandb_asked(wandb_run_id="r")[1]["resume"] == "allow"


def has_saved(save: Path) -> None:
    """What a run has in --save behind its first checkpoint, as far as trackers look."""
    (save / TRACKER_FILE).write_text("3")


def test_a_run_that_goes_on_goes_on_in_its_wandb_run_and_one_that_begins_has_its_own(wandb_asked, tmp_path: Path):
    save = tmp_path / "saved"
    line = {"save": str(save), "load": str(save)}
    assert wandb_asked(save=str(save), load="hf")[1]["id"] is None, "it begins, and W&B makes up an id"
    assert wandb_asked(**line)[1]["id"] is None, "it was killed before its first checkpoint: the same line begins"
    has_saved(save)
    resumed = wandb_asked(**line)[1]
    assert (resumed["id"], resumed["resume"], resumed["name"]) == ("made up", "allow", None)
    assert wandb_asked(**line, wandb_run_id="mine")[1]["id"] == "mine"
    assert wandb_asked(**line)[1]["id"] == "mine", "that is where it goes on now"
    assert wandb_asked(**line, finetune=True)[1]["id"] is None, "--resume never"
    assert wandb_asked(save=str(tmp_path / "branch"), load=str(save))[1]["id"] is None, "--resume OTHER"
    (save / "trackers.json").write_text("{")
    assert wandb_asked(**line)[1]["id"] is None, "a damaged file costs no run"


def test_a_run_that_goes_on_writes_to_the_tensorboard_directory_that_it_had(tmp_path: Path, monkeypatch):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    save = tmp_path / "saved"
    line = {"use_tensorboard": True, "tb_project_name": str(tmp_path / "tb"), "save": str(save), "load": str(save)}
    args = make_args(tmp_path, **line)
    for clock in ("20260101-000000", "20260102-000000", "20260103-000000"):
        monkeypatch.setattr("slime.observability.tensorboard_utils.time.strftime", lambda _, now=clock: now)
        init_tracking(args)
        log(args, {"train/step": int(clock[7]), "train/loss": 0.5}, "train/step")
        finish_tracking()
        has_saved(save)
    (directory,) = (tmp_path / "tb").iterdir()
    assert directory.name == "20260101-000000", "the second and the third run began from a checkpoint"
    events = event_accumulator.EventAccumulator(str(directory))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    init_tracking(make_args(tmp_path, **line, tb_experiment_name="e"))
    finish_tracking()
    assert (tmp_path / "tb" / "e").is_dir()


def test_a_run_that_goes_on_goes_on_in_both_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The packages themselves, W&B offline: each notes what it logs to in the same file."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    save = tmp_path / "saved"
    line = {"save": str(save), "load": str(save)}
    line |= {"use_tensorboard": True, "tb_project_name": str(tmp_path / "tb")}
    line |= {"use_wandb": True, "wandb_mode": "offline"}
    for clock in ("20260101-000000", "20260102-000000"):
        fake = Namespace(strftime=lambda _, now=clock: now)  # W&B reads the clock, too
        monkeypatch.setattr("slime.observability.tensorboard_utils.time", fake)
        init_tracking(make_args(tmp_path, **line))
        finish_tracking()
        has_saved(save)
    assert [path.name for path in (tmp_path / "tb").iterdir()] == ["20260101-000000"]
    ids = {path.stem.removeprefix("run-") for path in (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")}
    kept = json.loads((save / "trackers.json").read_text())
    assert kept == {"tensorboard_dir": str(tmp_path / "tb/20260101-000000"), "wandb_run_id": ids.pop()} and not ids


def test_wandb_files_are_below_their_directory(wandb_asked, tmp_path: Path):
    assert wandb_asked()[1]["dir"] == str(tmp_path)
    assert wandb_asked(wandb_dir=str(tmp_path / "w"))[1]["dir"] == str(tmp_path / "w")
    assert (tmp_path / "w").is_dir()


def test_wandb_is_logged_in_at_the_host_and_with_the_key_that_are_given(wandb_asked):
    assert wandb_asked(wandb_mode="online")[0] == [{"key": "a secret", "host": None}]
    assert wandb_asked(wandb_mode="online", wandb_host="h")[0] == [{"key": "a secret", "host": "h"}]
    assert wandb_asked(wandb_mode="online", wandb_host="h", wandb_key=None)[0] == [{"key": None, "host": "h"}]
    assert wandb_asked(wandb_mode="online", wandb_key=None)[0] == [], "wandb's own settings"
    assert wandb_asked()[0] == [], "offline"


def test_wandb_runs_of_a_group_have_names_of_their_own_unless_told_not_to(wandb_asked):
    first, second = (wandb_asked()[1]["name"] for _ in range(2))
    assert first.startswith("g-") and first != second
    assert wandb_asked(wandb_random_suffix=False)[1]["name"] == "g"


def test_tensorboard_files_are_in_a_directory_of_their_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    assert tensorboard_dir(make_args(tmp_path, tb_project_name="p", tb_experiment_name="e")) == Path("p/e")
    unnamed = tensorboard_dir(make_args(tmp_path, tb_project_name="p"))
    assert unnamed.parent == Path("p") and unnamed.name.startswith(time.strftime("%Y")), "its name is the time"
    monkeypatch.setenv("TENSORBOARD_DIR", "env")
    assert tensorboard_dir(make_args(tmp_path)) == Path("env")
    assert tensorboard_dir(make_args(tmp_path, tb_experiment_name="e")) == Path("env/e")
    assert tensorboard_dir(make_args(tmp_path, tb_project_name="p", tb_experiment_name="e")) == Path("p/e")


def test_rollout_records_carry_the_train_step_for_wandb_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())

    def written(record: dict[str, float], step_key: str, **changes: object) -> dict[str, float]:
        args = make_args(tmp_path, **{"use_wandb": True, "wandb_always_use_train_step": True} | changes)
        adapter, found = wandb_utils.WandbAdapter(args), []
        adapter.open({}, TrackedRun(tmp_path))
        adapter.run.log = found.append
        adapter.log(record, Step(step_key, int(record[step_key]), 0.0))
        return found[0]

    step = {"rollout/step": 3}
    assert written(step, "rollout/step") == step | {"train/step": 3 * (4 * 2 // 4)}
    # two steps a rollout; the samples that fill no third one are dropped
    assert written(step, "rollout/step", global_batch_size=3)["train/step"] == 3 * (4 * 2 // 3)
    assert written(step, "rollout/step", wandb_always_use_train_step=False) == step
    assert written({"train/step": 5}, "train/step") == {"train/step": 5}


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
