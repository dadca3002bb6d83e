"""The trackers' real libraries: refused, stopped, killed, on slow disks and on full ones."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.observability import logging_utils, trackers
from slime.observability.logging_utils import finish_tracking, init_tracking, log, log_alarm, log_eval_samples
from slime.observability.trackers import client, writer
from tests.unit.test_observability import ANSWERS, make_args
from tests.unit.test_trackers import Said, begin, log_steps, quick, until, warnings_of  # noqa: F401

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
    until(lambda: all(trackers.count_left(tmp_path, name) == 0 for name in ("tensorboard", "mlflow")), 300.0)
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
        assert trackers.count_left(tmp_path, name) == 0, name
    assert set(tensorboard_points(tmp_path / "tb", "train/loss")) == points
    assert set(trackio_points(tmp_path.name, "train/loss")) == points
    assert set(mlflow_points_of_files(tmp_path)) == points, "all in the run that it had"


def mlflow_points_of_files(directory: Path) -> list[tuple[int, float]]:
    place = trackers.read_place(directory, "mlflow")
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
    until(lambda: all(trackers.count_left(tmp_path, name) == 0 for name in names), 300.0)
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
    left = {name: trackers.count_left(tmp_path, name) for name in names}
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
from slime.observability import trackers
from tests.unit.test_observability import make_args
from tests.unit.test_trackers import log_steps
from tests.unit.test_tracker_libraries import NAMES, mlflow_points_of_files, tensorboard_points, trackio_points
run, disk = Path(sys.argv[1]), Path(sys.argv[2])
for name in ("mlruns", "swanlog"):
    (disk / name).mkdir()
    (run / name).symlink_to(disk / name)
os.environ |= {"SWANLAB_MODE": "offline", "TRACKIO_DIR": str(disk / "trackio")}
flags = {"use_wandb": True, "use_tensorboard": True, "tb_project_name": str(disk / "tb"), "wandb_dir": str(disk)}
init_tracking(make_args(run, tracker=NAMES, **flags))
log_steps(None, range(3))
names, end = (*NAMES, "wandb", "tensorboard"), time.monotonic() + 200
while any(trackers.count_left(run, name) for name in names):
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
left = {name: trackers.count_left(run, name) for name in names}
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
        assert trackers.count_left(tmp_path, name) == 0, name
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

    place = trackers.read_place(directory, "mlflow")
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
