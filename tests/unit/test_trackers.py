"""Trackers: the writer process, the real libraries without a server, and everything that can happen to them."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.checkpoints.paths import TRACKER_FILE
from slime.observability import logging_utils, trackers
from slime.observability.logging_utils import finish_tracking, init_tracking, log, log_alarm, log_eval_samples
from slime.observability.trackers import client, writer
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
    assert trackers.count_left(tmp_path, WOUNDED) == 3
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

    monkeypatch.setattr(trackers.Place, "write", full)
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
    assert "No space left on device" in warning and trackers.count_left(tmp_path, WOUNDED) == 4
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
    assert trackers.count_left(tmp_path, LINES) == 0


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
