"""Weights & Biases as a tracker: how a run is begun, named, gone on with, logged in, and ended in time."""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil
import pytest

from slime.checkpoints.paths import TRACKER_FILE
from slime.observability import wandb_utils
from slime.observability.logging_utils import (
    finish_tracking,
    init_tracking,
    log,
)
from slime.observability.trackers import Step, TrackedRun, client, writer
from slime.utils.errors import UsageError
from tests.unit.test_observability import make_args, no_tracking_is_left_over, run_of_two_steps  # noqa: F401


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
        monkeypatch.setattr("slime.observability.trackers.services.time.strftime", lambda _, now=clock: now)
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
        monkeypatch.setattr("slime.observability.trackers.services.time", fake)
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
