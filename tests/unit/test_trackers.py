"""Trackers: the writer process, the real libraries without a server, and everything that can happen to them."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.checkpoints.paths import TRACKER_FILE
from slime.observability import logging_utils, trackers
from slime.observability.logging_utils import finish_tracking, init_tracking, log, log_alarm, log_eval_samples
from slime.observability.trackers import client, state, writer
from tests.unit.test_observability import ANSWERS, make_args
from tests.unit.tracker_fakes import Wounded, got

LINES = "tests.unit.tracker_fakes:LinesTracker"
WOUNDED = "tests.unit.tracker_fakes:Wounded"
Said = list[tuple[str, str]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No long waits, nothing left over, and no failing tracker of the test before."""
    monkeypatch.setattr(writer, "POLL_S", 0.01)
    monkeypatch.setattr(writer, "LONGEST_PAUSE_S", 0.05)
    Wounded.hangs_at = Wounded.refuses = None
    Wounded.is_down = False
    yield
    finish_tracking()


def log_steps(args: Any, steps: range) -> None:
    for step in steps:
        log(args, {"train/step": step, "train/loss": step / 2}, "train/step")


def begin(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a run whose writer the test plays itself, with `deliver`."""
    monkeypatch.setattr(logging_utils, "TrackerWriter", lambda args, names: client.prepare(args, names))
    init_tracking(args)


def deliver(directory: Path, *, within_s: float = 10.0) -> Said:
    """Run the writer to its end; what it says."""
    said: Said = []
    ending = writer.Ending()
    ending.begin(within_s, {"status": "finished"})
    writer.serve(directory, lambda kind, text: said.append((kind, text)), ending)
    return said


def warnings_of(said: Said) -> list[str]:
    return [text for kind, text in said if kind == "warning"]


def steps_in(directory: Path) -> list[int]:
    return [call[2] for call in got(directory) if call[0] == "log"]


def until(condition: Any, within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


# --- what a tracker gets


def test_a_tracker_gets_flags_records_answers_alarms_and_the_end_in_order(tmp_path: Path, monkeypatch):
    args = make_args(tmp_path, tracker=[LINES])
    begin(args, monkeypatch)
    log(args, {"train/step": 4, "train/loss": math.nan}, "train/step")
    log_alarm({"what": "the loss is no number"})
    log_eval_samples(ANSWERS, 3)
    log_eval_samples(ANSWERS[:1], 5)
    assert warnings_of(deliver(tmp_path)) == []
    opened, logged, alarm, *answers, finish = got(tmp_path)
    assert opened == ["open", None, args.rollout_batch_size]
    assert logged[:3] == ["log", "train/step", 4] and math.isnan(logged[3]["train/loss"])
    assert alarm == ["alarm", 4, {"what": "the loss is no number"}]
    assert answers == [["samples", 3, ANSWERS], ["samples", 5, ANSWERS[:1]]]
    assert finish == ["finish", "finished"]


def test_an_evaluation_that_is_being_written_is_not_handed_over_in_two_parts(tmp_path: Path, monkeypatch):
    begin(make_args(tmp_path, tracker=[LINES]), monkeypatch)
    lane = writer.Lane(LINES, writer.read_run(tmp_path), lambda kind, text: None)
    assert not lane.deliver() and lane.deliver(), "the first look cannot know whether a file still grows"
    rows = [json.dumps({"eval/step": 3, **answer}) + "\n" for answer in ANSWERS]
    with (tmp_path / "eval_samples.jsonl").open("a") as file:
        for row in rows:
            file.write(row)
            file.flush()
            assert not lane.deliver()
    assert lane.deliver()
    assert [call for call in got(tmp_path) if call[0] == "samples"] == [["samples", 3, ANSWERS]]


def test_no_secret_is_in_what_the_writer_reads(tmp_path: Path, monkeypatch):
    begin(make_args(tmp_path, use_wandb=True, wandb_key="key-of-wandb"), monkeypatch)
    assert all("key-of-wandb" not in path.read_text() for path in (tmp_path / "trackers").iterdir())
    assert writer.read_run(tmp_path).args.wandb_key is None, "not ***, which a library would take for a key"


# --- what goes wrong


def test_a_service_that_is_down_costs_one_warning_and_a_gap_that_is_filled(tmp_path: Path, monkeypatch):
    args = make_args(tmp_path, tracker=[WOUNDED])
    begin(args, monkeypatch)
    log_steps(args, range(3))
    Wounded.is_down, said = True, []
    lane = writer.Lane(WOUNDED, writer.read_run(tmp_path), lambda kind, text: said.append((kind, text)))
    for _ in range(5):
        assert not lane.deliver()
    log_steps(args, range(3, 6))
    (warning,) = warnings_of(said)
    assert "does not work now (ConnectionError: nobody listens); the run goes on" in warning
    Wounded.is_down = False
    until(lane.deliver)
    assert steps_in(tmp_path) == list(range(6))
    assert [text for kind, text in said if "takes records again" in text]


def test_a_tracker_that_hangs_is_left_alone_and_holds_up_no_other(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(writer, "CALL_S", 0.2)
    args = make_args(tmp_path, tracker=[WOUNDED])
    begin(args, monkeypatch)
    log_steps(args, range(4))
    Wounded.hangs_at = 2
    begun = time.monotonic()
    (warning,) = warnings_of(deliver(tmp_path))
    assert time.monotonic() - begun < 4, "the call that hangs takes 5 s"
    assert "no answer within 0.2 s" in warning
    assert sorted(set(steps_in(tmp_path))) == list(range(4)), "each line at least once"


def test_a_record_that_a_tracker_never_takes_is_left_out_and_counted(tmp_path: Path, monkeypatch):
    args = make_args(tmp_path, tracker=[WOUNDED])
    begin(args, monkeypatch)
    log_steps(args, range(4))
    metrics = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(metrics + '{"cut short by a kill\n')
    Wounded.refuses = 1
    first, last = warnings_of(deliver(tmp_path))
    (tmp_path / "metrics.jsonl").write_text(metrics)
    assert "cannot take a record (ValueError: a metric has no such name); it is left out" in first
    assert f"lacks {1 + 1} records" in last
    assert steps_in(tmp_path) == [0, 2, 3]


def test_what_is_not_delivered_at_the_end_stays_and_a_command_delivers_it(tmp_path: Path, monkeypatch, capsys):
    args = make_args(tmp_path, tracker=[WOUNDED])
    begin(args, monkeypatch)
    log_steps(args, range(3))
    Wounded.is_down = True
    deliver(tmp_path, within_s=0.2)
    assert state.count_left(tmp_path, WOUNDED) == 3
    Wounded.is_down = False
    assert writer.deliver_the_rest(tmp_path) == 0
    assert steps_in(tmp_path) == [0, 1, 2] and f"{WOUNDED}: 0 lines left" in capsys.readouterr().out
    assert writer.deliver_the_rest(tmp_path / "other") == 2, "no run with a tracker"


def test_a_disk_that_is_full_costs_the_note_of_the_place_and_no_record(tmp_path: Path, monkeypatch):
    args = make_args(tmp_path, tracker=[LINES])
    begin(args, monkeypatch)
    log_steps(args, range(2))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state.Place, "write", full)
    (warning,) = warnings_of(deliver(tmp_path))
    assert "cannot be written" in warning and steps_in(tmp_path) == [0, 1]


def test_what_a_library_is_given_while_its_disk_fills_up_is_given_to_it_again(tmp_path: Path, monkeypatch):
    args = make_args(tmp_path, tracker=[WOUNDED])
    begin(args, monkeypatch)
    monkeypatch.setattr(Wounded, "directory", tmp_path, raising=False)
    said: Said = []
    lane = writer.Lane(WOUNDED, writer.read_run(tmp_path), lambda kind, text: said.append((kind, text)))
    log_steps(args, range(2))
    assert not lane.deliver() and lane.deliver() and steps_in(tmp_path) == [0, 1]
    with monkeypatch.context() as patch:
        patch.setattr(trackers, "ROOM", 1 << 62)  # no disk has so much
        assert not lane.deliver(), "it took them a moment ago, and may not have written them yet"
        log_steps(args, range(2, 4))
        assert not lane.deliver()
    (warning,) = warnings_of(said)
    assert "No space left on device" in warning and state.count_left(tmp_path, WOUNDED) == 4
    until(lane.deliver)
    assert steps_in(tmp_path) == [0, 1, 0, 1, 2, 3]


# --- which run of the service


def test_a_run_that_goes_on_gets_what_was_not_delivered_and_a_new_one_begins_with_its_own(tmp_path: Path, monkeypatch):
    args = make_args(tmp_path, tracker=[WOUNDED], save=str(tmp_path), load=str(tmp_path))
    begin(args, monkeypatch)
    deliver(tmp_path)
    log_steps(args, range(2))
    finish_tracking()
    (tmp_path / TRACKER_FILE).write_text("1")
    begin(args, monkeypatch)
    log_steps(args, range(2, 4))
    deliver(tmp_path)
    assert steps_in(tmp_path) == [0, 1, 2, 3]
    assert [call[1] for call in got(tmp_path) if call[0] == "open"] == [None, "made up"], "it has the run that it had"
    finish_tracking()
    log_steps_before = len((tmp_path / "metrics.jsonl").read_text().splitlines())
    assert log_steps_before == 4
    begin(make_args(tmp_path, tracker=[WOUNDED], save=str(tmp_path), load="another run"), monkeypatch)
    deliver(tmp_path)
    assert steps_in(tmp_path) == [0, 1, 2, 3] and got(tmp_path)[-2][:2] == ["open", None]


# --- the process


def test_a_writer_that_is_killed_is_started_again_and_nothing_is_lost(tmp_path: Path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(client, "RESTARTS_S", (0.05,))
    args = make_args(tmp_path, tracker=[LINES])
    init_tracking(args)
    running = logging_utils.tracking.writer
    assert running is not None
    log_steps(args, range(3))
    until(lambda: steps_in(tmp_path) == [0, 1, 2])
    first = running.pid
    assert psutil.Process(first).nice() == psutil.Process().nice() + 5, "it stands behind the run"
    os.kill(first, signal.SIGKILL)
    log_steps(args, range(3, 6))
    until(lambda: running.pid != first and steps_in(tmp_path)[-1] == 5)
    finish_tracking()
    assert sorted(set(steps_in(tmp_path))) == list(range(6)) and got(tmp_path)[-1] == ["finish", "finished"]
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1 and "killed by SIGKILL); it is started again" in said[0], said
    assert state.count_left(tmp_path, LINES) == 0


def test_a_writer_that_is_stopped_holds_up_neither_a_record_nor_the_end(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr(client, "SILENT_S", 0.3)
    monkeypatch.setattr(client, "SILENT_AT_END_S", 0.5)
    args = make_args(tmp_path, tracker=[LINES])
    init_tracking(args)
    assert logging_utils.tracking.writer is not None
    pid = logging_utils.tracking.writer.pid
    os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    log_steps(args, range(300))
    assert time.monotonic() - begun < 5, "the driver writes to its files only"
    until(lambda: any("has said nothing for" in text for text in caplog.messages))
    begun = time.monotonic()
    finish_tracking()
    assert time.monotonic() - begun < 20
    assert not Path(f"/proc/{pid}").exists()
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2 and f"lacks 300 lines, which are in {tmp_path}/metrics.jsonl" in said[1], said
    deliver(tmp_path)
    assert steps_in(tmp_path) == list(range(300))


# --- the libraries


def test_mlflow_gets_what_its_server_refused_and_keeps_its_run(tmp_path: Path, monkeypatch):
    """The real client, and a server that speaks MLflow's REST paths as far as it asks, or fails when it is told."""
    pytest.importorskip("mlflow")
    server = MlflowServer()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    try:
        args = make_args(tmp_path, tracker=["mlflow"])
        begin(args, monkeypatch)
        said: Said = []
        lane = writer.Lane("mlflow", writer.read_run(tmp_path), lambda kind, text: said.append((kind, text)))
        until(lane.deliver)
        server.status = 500
        log(args, {"rollout/step": 3, "eval/a-pass@4": 0.5}, "rollout/step")
        assert not lane.deliver() and not lane.deliver()
        server.status = 200
        log(args, {"rollout/step": 4, "eval/a-pass@4": 0.75}, "rollout/step")
        until(lane.deliver)
        assert server.metrics["eval/a-pass_4"] == [(3, 0.5), (4, 0.75)]
        assert server.num_runs == 1 and server.params["rollout_batch_size"] == "4"
        assert len(warnings_of(said)) == 1
    finally:
        server.end()


class MlflowServer:
    """Runs, parameters and metrics, in memory."""

    def __init__(self) -> None:
        self.status, self.num_runs = 200, 0
        self.metrics: dict[str, list[tuple[int, float]]] = {}
        self.params: dict[str, str] = {}
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({"experiment": {"experiment_id": "1", "name": "slime"}})

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
                path = self.path.rpartition("/")[2]
                if owner.status == 200 and path == "create":
                    owner.num_runs += 1
                if owner.status == 200 and path == "log-batch":
                    owner.params |= {param["key"]: param["value"] for param in asked.get("params", [])}
                    for metric in asked.get("metrics", []):
                        points = owner.metrics.setdefault(metric["key"], [])
                        points.append((int(metric["step"]), metric["value"]))
                info = {"run_id": "r", "run_uuid": "r", "experiment_id": "1", "artifact_uri": "mlflow-artifacts:/"}
                self._answer({"run": {"info": info, "data": {}}, "run_info": info})

            def _answer(self, value: Any) -> None:
                content = json.dumps(value if owner.status == 200 else {"error_code": "INTERNAL_ERROR"}).encode()
                self.send_response(owner.status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                """The test's output stays clean."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def end(self) -> None:
        """Close it."""
        self._server.shutdown()
        self._server.server_close()


NAMES = ["mlflow", "swanlab", "trackio"]  # besides W&B and TensorBoard


def args_of_every_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for package in ("wandb", "tensorboard", "mlflow", "swanlab", "trackio"):
        pytest.importorskip(package)
    for name, value in {"SWANLAB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    flags = {"use_wandb": True, "use_tensorboard": True, "tb_project_name": str(tmp_path / "tb")}
    return make_args(tmp_path, tracker=NAMES, **flags)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_library_has_the_whole_run_after_its_process_was_stopped_and_killed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(client, "RESTARTS_S", (0.05,))
    args = args_of_every_library(tmp_path, monkeypatch)
    init_tracking(args)
    running = logging_utils.tracking.writer
    assert running is not None
    log_steps(args, range(3))
    until(lambda: all(state.count_left(tmp_path, name) == 0 for name in ("tensorboard", "mlflow")), 300.0)
    first = running.pid
    os.kill(first, signal.SIGSTOP)
    begun = time.monotonic()
    log_steps(args, range(3, 6))
    assert time.monotonic() - begun < 5, "the run waits for no tracker"
    os.kill(first, signal.SIGCONT)
    os.kill(first, signal.SIGKILL)
    log_steps(args, range(6, 9))
    until(lambda: running.pid != first)
    finish_tracking()
    points = {(step, step / 2) for step in range(9)}
    for name in (*NAMES, "wandb", "tensorboard"):
        assert state.count_left(tmp_path, name) == 0, name
    assert set(tensorboard_points(tmp_path / "tb", "train/loss")) == points
    assert set(trackio_points(tmp_path.name, "train/loss")) == points
    assert set(mlflow_points_of_files(tmp_path)) == points, "all in the run that it had"


def mlflow_points_of_files(directory: Path) -> list[tuple[int, float]]:
    place = state.read_place(directory, "mlflow")
    assert place is not None and place.run is not None
    lines = next((directory / "mlruns").rglob(f"{place.run}/metrics/train/loss")).read_text().splitlines()
    return [(int(line.split()[2]), float(line.split()[1])) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_disk_that_is_slow_for_every_library_slows_no_record_and_loses_none(tmp_path: Path, monkeypatch, caplog):
    """Each write of the libraries, in all of their processes, takes 50 ms longer."""
    if shutil.which("strace") is None:
        pytest.skip("strace makes a disk slow: apt-get install strace")
    args = args_of_every_library(tmp_path, monkeypatch)
    init_tracking(args)
    running = logging_utils.tracking.writer
    assert running is not None
    names = (*NAMES, "wandb", "tensorboard")
    log_steps(args, range(1))
    until(lambda: all(state.count_left(tmp_path, name) == 0 for name in names), 300.0)
    processes = [running.pid, *(child.pid for child in psutil.Process(running.pid).children(recursive=True))]
    calls = "write,pwrite64,fsync,fdatasync"
    slow = ["strace", "-f", "-y", "-qq", "-e", f"trace={calls}", "-e", f"inject={calls}:delay_exit=50000"]
    slow += [word for pid in processes for word in ("-p", str(pid))]
    with (tmp_path / "strace.txt").open("wb") as traced, subprocess.Popen(slow, stderr=traced) as strace:
        until(lambda: "TracerPid:\t0" not in Path(f"/proc/{running.pid}/status").read_text())
        begun = time.monotonic()
        log_steps(args, range(1, 101))
        assert time.monotonic() - begun < 5, "the run waits for no tracker"
        finish_tracking()
        strace.terminate()
    slowed = [line for line in (tmp_path / "strace.txt").read_text().splitlines() if "DELAYED" in line]
    for folder in ("mlruns", "swanlog", "trackio", "wandb", "tb"):
        assert any(f"{tmp_path}/{folder}/" in line for line in slowed), f"no slow write below {folder}"
    left = {name: state.count_left(tmp_path, name) for name in names}
    said = [record.getMessage() for record in caplog.records if " lacks " in record.getMessage()]
    assert all(any(f"{name} lacks {count} lines" in text for text in said) for name, count in left.items() if count)
    deliver = [sys.executable, "-m", client.MODULE, str(tmp_path)]
    subprocess.run(deliver, check=True, timeout=300, cwd=Path(__file__).parents[2])
    points = {(step, step / 2) for step in range(101)}
    assert set(tensorboard_points(tmp_path / "tb", "train/loss")) == points
    assert set(mlflow_points_of_files(tmp_path)) == points
    assert set(trackio_points(tmp_path.name, "train/loss")) == points


FULL_DISK = """
import json, os, subprocess, sys, time
from pathlib import Path
from slime.observability.logging_utils import finish_tracking, init_tracking
from slime.observability.trackers import state
from tests.unit.test_observability import make_args
from tests.unit.test_trackers import NAMES, log_steps, mlflow_points_of_files, tensorboard_points, trackio_points
run, disk = Path(sys.argv[1]), Path(sys.argv[2])
for name in ("mlruns", "swanlog"):
    (disk / name).mkdir()
    (run / name).symlink_to(disk / name)
os.environ |= {"SWANLAB_MODE": "offline", "TRACKIO_DIR": str(disk / "trackio")}
flags = {"use_wandb": True, "use_tensorboard": True, "tb_project_name": str(disk / "tb"), "wandb_dir": str(disk)}
init_tracking(make_args(run, tracker=NAMES, **flags))
log_steps(None, range(3))
names, end = (*NAMES, "wandb", "tensorboard"), time.monotonic() + 200
while any(state.count_left(run, name) for name in names):
    assert time.monotonic() < end, "the libraries did not begin"
    time.sleep(0.2)
try:
    with open(disk / "filler", "wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
except OSError:
    pass
begun = time.monotonic()
log_steps(None, range(3, 303))
logged_s = time.monotonic() - begun
finish_tracking()
free = os.statvfs(disk).f_bavail
left = {name: state.count_left(run, name) for name in names}
os.unlink(disk / "filler")
deliver = [sys.executable, "-m", "slime.observability.trackers.writer", str(run)]
again = subprocess.run(deliver, cwd=os.environ["PYTHONPATH"], timeout=200)
got = {
    "tensorboard": tensorboard_points(disk / "tb", "train/loss"),
    "mlflow": mlflow_points_of_files(run),
    "trackio": trackio_points(run.name, "train/loss"),
}
has = {name: len(set(points)) for name, points in got.items()}
steps = [json.loads(line)["train/step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
told = {"free": free, "logged_s": logged_s, "steps": steps, "left": left, "has": has, "again": again.returncode}
print(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_ends_as_it_would_when_the_disk_of_every_library_is_full(tmp_path: Path):
    for package in ("wandb", "tensorboard", "mlflow", "swanlab", "trackio"):
        pytest.importorskip(package)
    run, disk = tmp_path / "run", tmp_path / "disk"
    run.mkdir(), disk.mkdir()
    inside = f'mount -t tmpfs -o size=8m none {disk} && exec {sys.executable} -c "$PROGRAM" {run} {disk}'
    environment = os.environ | {"PROGRAM": FULL_DISK, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        ["unshare", "-Urm", "bash", "-c", inside], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["free"] == 0, "the disk is full"
    assert set(told["left"].values()) == {300}, "what a library wrote to a full disk does not count as delivered"
    assert told["again"] == 0 and set(told["has"].values()) == {303}, "it is delivered when there is room again"
    assert told["logged_s"] < 10 and told["steps"] == list(range(303)), (
        "the run waits for no tracker, and loses nothing"
    )


@pytest.mark.timeout(300)
def test_every_library_takes_a_run_without_a_server_in_one_process(tmp_path: Path, monkeypatch, caplog):
    """The real packages in the real process; what they have written is read back with their own code."""
    args, names = args_of_every_library(tmp_path, monkeypatch), NAMES
    init_tracking(args)
    log_steps(args, range(3))
    log(args, {"eval/step": 3, "eval/a-pass@2": 0.5}, "eval/step")
    log_eval_samples(ANSWERS, 3)
    log_alarm({"name": "kl", "what": "the KL spikes"})
    finish_tracking()
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in warnings if record.name.startswith("slime")] == []
    for name in (*names, "wandb", "tensorboard"):
        assert state.count_left(tmp_path, name) == 0, name
    points = [(step, step / 2) for step in range(3)]
    assert tensorboard_points(tmp_path / "tb", "train/loss") == points
    assert mlflow_points(tmp_path, "train/loss") == points
    assert trackio_points(tmp_path.name, "train/loss") == points
    (wandb_file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    swanlab_files = b"".join(path.read_bytes() for path in (tmp_path / "swanlog").rglob("*") if path.is_file())
    for content in (wandb_file.read_bytes(), swanlab_files):
        assert b"train/loss" in content and b"the KL spikes" in content
    assert b"a?" in swanlab_files, "answers"


def tensorboard_points(root: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (directory,) = root.iterdir()
    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def mlflow_points(directory: Path, name: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    place = state.read_place(directory, "mlflow")
    assert place is not None and place.run is not None
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    store = MlflowClient(tracking_uri=(directory / "mlruns").as_uri())
    run = store.get_run(place.run)
    assert run.info.status == "FINISHED" and run.data.params["rollout_batch_size"] == "4"
    assert run.data.tags["alarm"] == "the KL spikes" and run.data.metrics["eval/a-pass_2"] == 0.5
    assert json.loads((Path(run.info.artifact_uri.removeprefix("file://")) / "eval_samples/0000003.json").read_text())
    return [(metric.step, metric.value) for metric in store.get_metric_history(place.run, name)]


def trackio_points(run: str, name: str) -> list[tuple[int, float]]:
    import subprocess
    import sys

    # It reads TRACKIO_DIR when it is imported.
    code = (
        "import json, trackio; from trackio.sqlite_storage import SQLiteStorage; "
        f"print(json.dumps([(row['step'], row[{name!r}]) for row in SQLiteStorage.get_logs('slime', {run!r}) "
        f"if {name!r} in row]))"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return [(step, value) for step, value in json.loads(printed.splitlines()[-1])]


def test_a_driver_that_is_gone_ends_no_delivery() -> None:
    program = (
        "from slime.observability.trackers.writer import _say_to_driver\n"
        "say = _say_to_driver()\n"
        "input()\n"
        "say('alive', ''); say('alive', '')\n"
        "import os; os._exit(0)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdin is not None and writer.stdout is not None
    writer.stdout.close()
    writer.stdin.write(b"\n")
    writer.stdin.close()
    assert writer.wait(60) == 0
