"""The server of the pages: who may ask, what is never read, and runs as they are found on disks."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.testclient import TestClient

from slime import cli
from slime.dashboard.address import is_loopback, lines_for_user
from slime.dashboard.runs import Library
from slime.observability.series import LONGEST_LINE, Lines
from tests.dashboard.run_files import TOKEN, client_of, only_run, records_of_rollout, write_lines, write_run

ROOT = Path(__file__).resolve().parents[2]
# ---- who may ask


def test_without_the_token_nothing_is_answered(tmp_path: Path) -> None:
    write_run(tmp_path)
    client = client_of(tmp_path, token=None)
    for path in ("/", "/api/runs", "/static/js/main.js", "/nothing"):
        assert client.get(path).status_code == 401, path
    assert client.get("/api/runs", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert client.get("/?token=wrong").status_code == 401
    assert client.get("/api/runs", headers={"cookie": "slime_dashboard_80=wrong"}).status_code == 401


def test_the_token_in_the_address_becomes_a_cookie_and_leaves_the_address(tmp_path: Path) -> None:
    write_run(tmp_path)
    client = client_of(tmp_path, token=None)
    answer = client.get(f"/?token={TOKEN}", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert client.get("/api/runs").status_code == 200  # the client sends the cookie


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_is_answered(tmp_path: Path, method: str) -> None:
    assert client_of(tmp_path).request(method, "/api/runs").status_code == 405


def test_on_the_loopback_another_host_name_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path)
    client = client_of(tmp_path)
    assert client.get("/", headers={"host": "evil.example"}).status_code == 421
    for name in ("evil.example:8123", "[", "127.0.0.1:x", "127.0.0.1.evil.example"):
        assert client.get("/", headers={"host": name}).status_code == 421, name
    for name in ("localhost:8123", "127.0.0.1:1", "[::1]:80"):
        assert client.get("/", headers={"host": name}).status_code == 200, name
    assert client_of(tmp_path, host="0.0.0.0").get("/", headers={"host": "node-7:8123"}).status_code == 200


def test_every_answer_forbids_inline_scripts_other_hosts_and_sniffing(tmp_path: Path) -> None:
    for client in (client_of(tmp_path), client_of(tmp_path, token=None)):
        headers = client.get("/").headers
        assert headers["content-security-policy"].startswith("default-src 'self'")
        assert "unsafe" not in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")


def test_the_pages_name_no_other_host_and_hold_no_inline_code() -> None:
    static = ROOT / "slime" / "dashboard" / "static"
    own = [
        path for path in static.rglob("*") if path.suffix in (".html", ".js", ".css") and "vendor" not in path.parts
    ]
    assert len(own) >= 8
    for path in own:
        text = path.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), path
    assert not re.search(r"<script(?![^>]* src=)|<style| style=| on\w+=", (static / "index.html").read_text())
    assert "MIT" in (static / "vendor" / "uplot" / "LICENSE").read_text()


# ---- what is never read


def test_no_address_leads_out_of_the_directories(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    run = write_run(tmp_path / "runs" / "a")
    client = client_of(tmp_path / "runs")
    for path in (
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static//etc/passwd",
        "/api/runs/..%2f..%2fsecret.txt",
    ):
        assert client.get(path).status_code == 404, path
    assert run.name == "a"


def test_links_that_lead_out_of_the_directories_are_not_followed(tmp_path: Path) -> None:
    other = write_run(tmp_path / "elsewhere")
    (other / "logs").mkdir()
    (other / "logs" / "error.txt").write_text("secret")
    run = write_run(tmp_path / "runs" / "a")
    (run / "logs").symlink_to(other / "logs")
    (run / "stall_report.txt").symlink_to(other / "logs" / "error.txt")
    (run / "rollouts").symlink_to(other)
    (tmp_path / "runs" / "b").symlink_to(other)
    client = client_of(tmp_path / "runs")
    assert [run["name"] for run in client.get("/api/runs").json()["runs"]] == ["runs/a"]
    page = client.get(f"/api/runs/{only_run(client)}")
    assert "secret" not in page.text and page.json()["stall_report"] is None


# ---- lines of files that grow


def test_a_file_that_grows_is_read_once_and_a_line_cut_short_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = Lines(path, tmp_path)
    assert lines.read() == []
    path.write_text('{"a": 1}\n{"a": ')
    assert lines.read() == [{"a": 1}]
    assert lines.read() == []
    with path.open("a") as file:
        file.write("2}\n")
    assert (lines.read(), lines.num_broken, lines.generation) == ([{"a": 2}], 0, 0)
    path.write_text('{"a": 3}\n')  # cut: read from its beginning
    assert (lines.read(), lines.generation) == ([{"a": 3}], 1)


def test_lines_that_hold_no_object_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = Lines(path, tmp_path)
    path.write_bytes(b'[1]\nnonsense\n{"a": "\xff"}\n\n' + b"[" * 5000 + b'\n{"b": NaN}\n')
    first, second = lines.read()
    assert (first, list(second), lines.num_broken) == ({"a": "\ufffd"}, ["b"], 3)


def test_a_line_without_end_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = Lines(path, tmp_path)
    with path.open("wb") as file:
        for _ in range(3):
            file.write(b"x" * (LONGEST_LINE // 2 + 1))
    assert lines.read() == [] and len(lines._rest) <= LONGEST_LINE + 1
    with path.open("ab") as file:
        file.write(b'\n{"a": 1}\n')
    assert lines.read() == [{"a": 1}]


# ---- runs


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, TestClient]]:
    root = tmp_path_factory.mktemp("runs")
    flags = {"rollout_batch_size": 4, "n_samples_per_prompt": 8, "save": None}
    yield write_run(root / "a", flags=flags), client_of(root)


def test_the_page_of_a_run_says_how_far_it_is(live: tuple[Path, TestClient]) -> None:
    _, client = live
    page = client.get(f"/api/runs/{only_run(client)}").json()
    assert (page["status"], page["rollout"], page["num_rollout"]) == ("running", 10, 20)
    assert page["phase"]["name"] == "generate"
    assert page["rollout_seconds"] == pytest.approx(20.0)
    assert page["eta_s"] == pytest.approx((20 - 10) * 20.0)
    assert {light["name"]: light["color"] for light in page["lights"]}["process"] == "green"


def test_series_over_every_axis(live: tuple[Path, TestClient]) -> None:
    _, client = live
    run, name = only_run(client), "rollout/raw_reward"

    def x_of(axis: str) -> list[float]:
        answer = client.get(f"/api/runs/{run}/series", params={"name": name, "axis": axis})
        return answer.json()["series"][name]["x"]

    assert x_of("step") == list(range(10))
    assert x_of("time") == pytest.approx([20.0 * rollout + 1.0 for rollout in range(10)])  # the first record is at 0
    assert x_of("samples") == [32.0 * (rollout + 1) for rollout in range(10)]
    lengths = [100.0 + rollout for rollout in range(10)]
    assert x_of("tokens") == [32.0 * sum(lengths[: rollout + 1]) for rollout in range(10)]
    assert client.get(f"/api/runs/{run}/series", params={"name": name, "axis": "moon"}).status_code == 400
    assert client.get(f"/api/runs/{run}/series", params={"name": name, "after": "x"}).status_code == 400


def test_a_page_asks_only_for_what_is_new(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    client = client_of(tmp_path)
    run, name = only_run(client), "train/grad_norm"
    first = client.get(f"/api/runs/{run}/series", params={"name": name}).json()
    write_lines(tmp_path / "metrics.jsonl", records_of_rollout(3, time.time()))
    time.sleep(0.6)  # files are looked at twice a second at most
    then = client.get(f"/api/runs/{run}/series", params={"name": name, "after": first["record"]}).json()
    assert (first["series"][name]["x"], then["series"][name]["x"]) == ([0, 1, 2], [3])


def test_of_a_step_that_was_logged_twice_the_later_value_counts(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        write_lines(tmp_path / "metrics.jsonl", [{"step_key": "train/step", "time": 1.0, "train/step": 5, "a": value}])
    client = client_of(tmp_path)
    answer = client.get(f"/api/runs/{only_run(client)}/series", params={"name": "a"}).json()
    assert (answer["series"]["a"]["x"], answer["series"]["a"]["y"]) == ([5.0], [2.0])


def test_long_series_are_thinned_to_means_of_neighbours(tmp_path: Path) -> None:
    steps = [{"step_key": "train/step", "time": float(i), "train/step": i, "a": float(i)} for i in range(10)]
    write_lines(tmp_path / "metrics.jsonl", steps)
    client = client_of(tmp_path)
    answer = client.get(f"/api/runs/{only_run(client)}/series", params={"name": "a", "points": 5}).json()["series"][
        "a"
    ]
    assert (answer["x"], answer["y"], answer["of"]) == ([1, 3, 5, 7, 9], [0.5, 2.5, 4.5, 6.5, 8.5], 2)


def test_values_that_are_not_finite_become_null(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step_key": "train/step", "time": 1, "train/step": 0, "a": NaN, "rollout/raw_reward": Infinity}\n'
    )
    client = client_of(tmp_path)
    run = only_run(client)
    assert client.get(f"/api/runs/{run}/series", params={"name": "a"}).json()["series"]["a"]["y"] == [None]
    assert client.get(f"/api/runs/{run}").json()["headlines"] == {"rollout/raw_reward": None}


def test_alarms_are_shown_and_are_no_metrics(tmp_path: Path) -> None:
    write_run(tmp_path, 10)
    alarm = {"name": "truncated", "since": 7, "evidence": "30%", "flags": ["--rollout-max-response-len"], "docs": "d"}
    write_lines(
        tmp_path / "metrics.jsonl", [{"step_key": "rollout/step", "time": 1.0, "rollout/step": 9, "alarm": alarm}]
    )
    client = client_of(tmp_path)
    page = client.get(f"/api/runs/{only_run(client)}").json()
    assert page["alarm_list"] == [{**alarm, "step": 9.0, "time": 1.0}]
    assert {light["name"]: light["color"] for light in page["lights"]}["alarms"] == "amber"
    over = {"step_key": "rollout/step", "time": 2.0, "rollout/step": 9, "alarm": {**alarm, "state": "ended"}}
    write_lines(tmp_path / "metrics.jsonl", [over])
    client = client_of(tmp_path)
    page = client.get(f"/api/runs/{only_run(client)}").json()
    assert len(page["alarm_list"]) == 2
    assert {light["name"]: light["color"] for light in page["lights"]}["alarms"] == "green"


def test_what_a_metric_means_comes_with_its_name(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    client = client_of(tmp_path)
    found = client.get(f"/api/runs/{only_run(client)}/metrics").json()
    assert (
        found["docs"]["rollout/raw_reward"]["meaning"]
        == "mean reward of the samples, as scored; untrusted ones left out"
    )
    assert set(found["docs"]) <= set(found["metrics"])


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, "running"),
        ({"pid": 2**22 + 1}, "lost"),
        ({"time": 0.0}, "lost"),
        ({"host": "elsewhere", "time": 1.0}, "lost"),
    ],
)
def test_a_run_whose_process_is_gone_is_lost(tmp_path: Path, changed: dict[str, object], status: str) -> None:
    write_lines(
        tmp_path / "run_events.jsonl",
        [{"event": "start", "time": time.time(), "host": socket.gethostname(), "pid": os.getpid(), **changed}],
    )
    [run] = Library([tmp_path]).runs()
    run.refresh()
    assert run.status() == status


def test_a_crashed_run_says_why(tmp_path: Path) -> None:
    write_run(tmp_path, 3, flags={})
    write_lines(
        tmp_path / "run_events.jsonl", [{"event": "finish", "time": 1.0, "status": "failed", "error": "rank 3"}]
    )
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "error.txt").write_text("Traceback: rank 3")
    (tmp_path / "logs" / "trainer_0.log").write_text(
        "[10:00:00] WARNING slime.x: slow\n[10:00:01] INFO slime.x: fine\n"
    )
    client = client_of(tmp_path)
    page = client.get(f"/api/runs/{only_run(client)}").json()
    assert (page["status"], page["end"]["error"], page["error"]) == ("failed", "rank 3", "Traceback: rank 3")
    assert [warning["text"] for warning in page["warnings"]] == ["[10:00:00] WARNING slime.x: slow"]


def test_a_train_step_is_found_in_its_rollout_and_restarts_are_counted(tmp_path: Path) -> None:
    write_run(tmp_path, 4, flags={})  # 4 rollouts, each with a train step of its number, and one plan
    more = [{"step_key": "train/step", "time": 1.0, "train/step": step, "train/loss": 0.0} for step in range(4, 12)]
    write_lines(tmp_path / "metrics.jsonl", more)
    write_lines(tmp_path / "run_events.jsonl", [{"event": "plan", "time": 1.0, "first": 2, "num_rollout": 8}])
    client = client_of(tmp_path)
    run = only_run(client)
    assert client.get(f"/api/runs/{run}/metrics").json()["steps_per_rollout"] == 12 // 4
    assert client.get(f"/api/runs/{run}").json()["restarts"] == 1


def test_a_resumed_run_is_where_it_is_now_and_not_where_it_was_lost(tmp_path: Path) -> None:
    write_run(tmp_path, 6, flags={})
    alarm = {"step_key": "rollout/step", "time": 1.0, "rollout/step": 5, "alarm": {"name": "truncated"}}
    resumed = time.time() + 1
    write_lines(tmp_path / "metrics.jsonl", [alarm])
    again = [
        {"event": "start", "time": resumed, "flags": {}, "host": socket.gethostname(), "pid": os.getpid()},
        {"event": "plan", "time": resumed, "first": 2, "num_rollout": 12},
    ]
    write_lines(tmp_path / "run_events.jsonl", again)
    page = client_of(tmp_path).get("/api/runs").json()["runs"][0]
    assert (page["rollout"], page["alarms"]) == (2, 0), "the alarm was raised by what was lost"
    write_lines(tmp_path / "metrics.jsonl", records_of_rollout(2, resumed))
    client = client_of(tmp_path)
    page = client.get(f"/api/runs/{only_run(client)}").json()
    assert (page["rollout"], page["num_rollout"], page["restarts"]) == (3, 12, 1)


def test_a_bare_metrics_file_with_a_last_line_cut_short_opens(tmp_path: Path) -> None:
    write_run(tmp_path, 4)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step_key": "train/st')
    client = client_of(tmp_path)
    page = client.get(f"/api/runs/{only_run(client)}").json()
    assert (page["rollout"], page["num_rollout"], page["command"]) == (4, None, None)
    assert client.get(f"/api/runs/{page['id']}/metrics").json()["axes"] == ["step", "time"]


def test_fifty_runs_are_one_list(tmp_path: Path) -> None:
    for number in range(50):
        write_run(tmp_path / f"run{number:02}", 5)
    runs = client_of(tmp_path).get("/api/runs").json()["runs"]
    assert [run["name"] for run in runs] == [f"{tmp_path.name}/run{number:02}" for number in range(50)]
    assert len({run["id"] for run in runs}) == 50
    assert all(run["reward"] == pytest.approx(1 - math.exp(-4 / 20)) for run in runs)


# ---- how it is started


def test_whoever_may_sit_elsewhere_is_told_how_to_get_there() -> None:
    [line] = lines_for_user("127.0.0.1", 8123, TOKEN, {})
    assert line == f"dashboard: http://127.0.0.1:8123/?token={TOKEN}"
    for host, environment in (("127.0.0.1", {"SSH_CONNECTION": "x"}), ("0.0.0.0", {}), ("10.0.0.7", {})):
        lines = lines_for_user(host, 8123, TOKEN, environment)
        assert "ssh -L 8123:" in lines[1] and f"http://127.0.0.1:8123/?token={TOKEN}" in lines[2]
    assert not is_loopback("0.0.0.0") and is_loopback("::1")


def start_view(directory: Path, **output: Any) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "slime.dashboard", str(directory)]
    environment = {name: os.environ[name] for name in os.environ if name not in ("SSH_CONNECTION", "SLURM_JOB_ID")}
    server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, **output)
    assert server.stdout is not None
    found = re.search(r"(http://[^/]+)/\?token=(\S+)", server.stdout.readline())
    assert found
    return server, f"{found[1]} {found[2]}"


def test_the_command_serves_follows_a_run_and_stays_small(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    server, printed = start_view(tmp_path)
    url, token = printed.split()

    def ask(path: str) -> urllib.request.Request:
        return urllib.request.Request(f"{url}{path}", headers={"authorization": f"Bearer {token}"})

    try:
        with urllib.request.urlopen(ask("/api/runs"), timeout=20) as answer:
            [run] = json.load(answer)["runs"]
        with urllib.request.urlopen(ask(f"/api/events?runs={run['id']}"), timeout=20) as stream:
            first = json.loads(stream.readline().removeprefix(b"data: "))
            write_lines(tmp_path / "metrics.jsonl", records_of_rollout(3, time.time()))
            stream.readline()
            second = json.loads(stream.readline().removeprefix(b"data: "))
        assert second["version"][0] == first["version"][0] + 3
        process = psutil.Process(server.pid)
        assert process.memory_info().rss <= 80_000_000
        used = sum(process.cpu_times()[:2])
        time.sleep(1.0)
        assert sum(process.cpu_times()[:2]) - used <= 0.05, "nobody looks"
    finally:
        server.terminate()
        assert server.wait(10) is not None


def test_a_full_disk_ends_no_server(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    with Path("/dev/full").open("w") as full:
        server, printed = start_view(tmp_path, stderr=full)
    url, token = printed.split()
    host, port = url.removeprefix("http://").split(":")
    try:
        for _ in range(3):
            with socket.create_connection((host, int(port)), timeout=20) as visitor:
                visitor.sendall(b"what is no request\r\n\r\n")  # it says so in its log, which has no room
                assert b"400" in visitor.recv(100)
        asked = urllib.request.Request(f"{url}/api/runs", headers={"authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked, timeout=20) as answer:
            assert len(json.load(answer)["runs"]) == 1
    finally:
        server.terminate()
        server.wait(10)


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_view_refuses_a_number_that_is_no_port(port: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["view", str(tmp_path), "--port", port])
    assert ended.value.code == 2
    assert "Invalid value for '--port'" in capsys.readouterr().err


def test_runs_are_listed_a_line_each_with_rollouts_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", 3)
    write_run(tmp_path / "b", 5)
    with pytest.raises(SystemExit) as ended:
        cli.main(["runs", str(tmp_path)])
    assert ended.value.code == 0
    lines = {line.split()[-1]: line.split()[1] for line in capsys.readouterr().out.splitlines()}
    assert {name.rpartition("/")[2]: done.partition("/")[0] for name, done in lines.items()} == {"a": "3", "b": "5"}
