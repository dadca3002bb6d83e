"""The pages next to a run: flags, a process of its own, and what the run writes down for them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slime.config.parse import parse_args
from slime.dashboard import address
from slime.observability.logging_utils import RunEvents
from slime.observability.phases import Phases
from slime.processes.directories import EVENTS_FILE
from slime.processes.registry import registry
from slime.utils.errors import UsageError
from tests.dashboard.run_files import write_run
from tests.unit.argument_mutations import base_lines, write_files


@pytest.fixture
def dashboards() -> Iterator[list[psutil.Process]]:
    """The processes that a test has started; none is left."""
    before = set(psutil.Process().children())
    started: list[psutil.Process] = []
    yield started
    registry().end_all()
    assert set(psutil.Process().children()) <= before


def status_of(url: str, token: str = "") -> int:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_run_serves_its_pages_from_a_process_of_its_own(
    tmp_path: Path, dashboards: list[psutil.Process], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-of-the-run")
    write_run(tmp_path)
    with caplog.at_level(logging.INFO):
        address.start_beside_run(tmp_path, "127.0.0.1", 0)
    [url] = re.findall(r"dashboard: (\S+)", caplog.text)
    page, _, token = url.partition("?token=")
    assert (status_of(page, token), status_of(page)) == (200, 401)
    [dashboard] = [child for child in psutil.Process().children() if "slime.dashboard" in child.cmdline()]
    assert dashboard.nice() == psutil.Process().nice() + 10
    assert Path(f"/proc/{dashboard.pid}/oom_score_adj").read_text().strip() == "1000"
    assert token not in " ".join(dashboard.cmdline())  # which every user of the machine can read
    assert "a-secret-of-the-run" not in dashboard.environ().values()
    dashboard.send_signal(signal.SIGSTOP)  # one that hangs, and then dies, is nothing to the run
    begin = time.monotonic()
    registry().end_all(grace_s=0.2)
    assert time.monotonic() - begin < 5.0


def test_no_pages_are_started_where_they_are_off(tmp_path: Path, dashboards: list[psutil.Process]) -> None:
    address.start_beside_run(tmp_path, "127.0.0.1", -1)
    assert not [child for child in psutil.Process().children() if "slime.dashboard" in child.cmdline()]


def test_a_port_that_is_taken_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address.start_beside_run(tmp_path, "127.0.0.1", taken.getsockname()[1])
    assert "no dashboard (--dashboard-host 127.0.0.1 --dashboard-port" in caplog.text


def test_flags_of_the_dashboard_that_cannot_work_or_have_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    words = base_lines()[0]
    for port in ("-2", "65536"):
        with pytest.raises(UsageError, match=f"--dashboard-port {port}"):
            parse_args(argv=[*words, "--dashboard-port", port])
    parse_args(argv=[*words, "--dashboard-port", "-1", "--dashboard-host", "0.0.0.0"])
    assert "--dashboard-host 0.0.0.0 with --dashboard-port -1" in caplog.text


def test_a_run_writes_down_its_flags_without_secrets_and_its_phases(tmp_path: Path) -> None:
    events = RunEvents(tmp_path)
    events.start("python train.py --wandb-key ***", None, {"lr": 1e-3, "wandb_key": "secret", "path": Path("x")})
    phases = Phases(on_change=lambda change, name: events.write(change, phase=name))
    with contextlib.suppress(RuntimeError), phases.enter("train"):
        raise RuntimeError
    start, begin, end = [json.loads(line) for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert (start["flags"]["lr"], start["flags"]["path"], start["pid"]) == (1e-3, "x", os.getpid())
    assert "secret" not in json.dumps(start)
    assert [(event["event"], event["phase"]) for event in (begin, end)] == [("begin", "train"), ("end", "train")]


def test_a_host_that_is_none_and_a_user_without_a_name_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    address.start_beside_run(tmp_path, "a..b", 0)
    assert "no dashboard" in caplog.text and "a..b" in caplog.text
    monkeypatch.setattr("getpass.getuser", nobody)
    lines = address.lines_for_user("127.0.0.1", 1, "t", {"SSH_CONNECTION": "x"})
    assert f" {os.getuid()}@" in lines[1]
