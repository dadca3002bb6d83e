"""A run's output on a terminal of 120 x 30, as a terminal shows it: lines above, bars below, and no debris of them."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import ptyprocess
import pyte

DEADLINE_S = 60.0
RUN = """
import logging, os, signal, sys, threading, time
from pathlib import Path
from slime.observability import phases as module
from slime.observability.console import ConsoleSink
from slime.observability.logging_utils import configure_logger
from slime.observability.phases import Phases

signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background may have it ignored
module.PERIOD_S = 0.02
go = Path(sys.argv[1])
configure_logger()
phases = Phases()
shown = module.RunStatus(phases, lambda: [("rollout 1", 3, 8)], print)
sink = ConsoleSink(clock=iter(range(9)).__next__)
shown.begin()
try:
    with phases.enter("start"):
        shown.announce("connecting to Ray")
    sink.begin(1)
    for rollout_id in range(2):
        shown.count_rollouts(rollout_id, 2)
        with phases.enter("generate"):
            while rollout_id and not go.exists():
                time.sleep(0.02)
        worker = threading.Thread(target=print, args=("\\x1b[36m(RolloutManager pid=7)\\x1b[0m from a worker",))
        worker.start()
        worker.join()
        logging.getLogger("slime").warning("a warning")
        sink.write({"rollout/step": rollout_id, "rollout/raw_reward": 0.5, "train/pg_loss": 0.0}, "rollout/step")
        sink.end_rollout(rollout_id)
except KeyboardInterrupt:
    shown.end()
    sys.stderr.write("interrupted\\n")
finally:
    shown.end()
"""
OF_A_ROLLOUT = ["(RolloutManager pid=7) from a worker", "[time] WARNING slime: a warning"]
FIRST = ["connecting to Ray", *OF_A_ROLLOUT, "rollout 0/1 reward 0.500 1.0 s eta 1 s"]
BARS = [r"rollouts  +━[━╸╺ ]+1/2", r"rollout 1 ━[━╸╺ ]+3/8 \d+ s"]


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, tmp_path: Path, **env: str) -> None:
        self.go, self.raw = tmp_path / "go", b""
        self._screen = pyte.Screen(120, 30)
        self._stream = pyte.ByteStream(self._screen)
        changes = {"TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path), **env}
        self._environment = {name: value for name, value in (os.environ | changes).items() if name != "COLUMNS"}
        command = [sys.executable, "-c", RUN, str(self.go)]
        self.process = ptyprocess.PtyProcess.spawn(command, dimensions=(30, 120), env=self._environment)

    def read_until(self, *patterns: str) -> list[str]:
        """What the terminal shows once its last lines match; without patterns at the program's end."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            lines = self.lines()
            last = lines[-len(patterns) :]
            if patterns and len(last) == len(patterns) and all(map(re.fullmatch, patterns, last)):
                return lines[: -len(patterns)]
            if select.select([self.process.fd], [], [], 0.1)[0]:
                try:
                    data = os.read(self.process.fd, 65536)
                except OSError:  # what a terminal says whose program is gone
                    data = b""
                if not data:
                    assert not patterns, lines
                    self.process.wait()
                    return self.lines()
                self.raw += data
                self._stream.feed(data)
        raise AssertionError(f"waited {DEADLINE_S:.0f} s; the terminal shows {self.lines()}")

    def lines(self) -> list[str]:
        """The rows down to the last one that is not empty, without times."""
        rows = "\n".join(row.rstrip() for row in self._screen.display).rstrip()
        return re.sub(r"\[\d\d:\d\d:\d\d\]", "[time]", rows).split("\n")

    def has_cursor(self) -> bool:
        """Whether the cursor is shown."""
        return not self._screen.cursor.hidden


def test_lines_stand_above_the_bars_and_the_bars_leave_nothing_behind(tmp_path: Path):
    terminal = Terminal(tmp_path)
    assert terminal.read_until(*BARS) == FIRST
    assert terminal.has_cursor(), "a driver that is killed leaves it as it is"
    terminal.go.touch()
    assert terminal.read_until() == [*FIRST, *OF_A_ROLLOUT, "rollout 1/1 reward 0.500 (+0.000) 1.0 s"]
    assert terminal.has_cursor()


def test_after_ctrl_c_the_lines_are_left_without_the_bars(tmp_path: Path):
    terminal = Terminal(tmp_path)
    terminal.read_until(*BARS)
    terminal.process.sendintr()
    assert terminal.read_until() == [*FIRST, "interrupted"]
    assert terminal.has_cursor()


def test_with_no_color_the_bars_have_no_color(tmp_path: Path):
    terminal = Terminal(tmp_path, NO_COLOR="1")
    terminal.read_until(*BARS)
    terminal.go.touch()
    terminal.read_until()
    assert not re.search(rb"\x1b\[[\d;]*[34]\d", terminal.raw)


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path):
    terminal = Terminal(tmp_path, TERM="dumb")
    terminal.go.touch()
    assert terminal.read_until()[-1] == "rollout 1/1 reward 0.500 (+0.000) 1.0 s"
    assert b"\x1b" not in terminal.raw.replace(b"\x1b[36m", b"").replace(b"\x1b[0m", b"")


def test_a_file_gets_plain_lines(tmp_path: Path):
    (tmp_path / "go").touch()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "FORCE_COLOR": "1"}
    command = [sys.executable, "-c", RUN, str(tmp_path / "go")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    of_worker = "\x1b[36m(RolloutManager pid=7)\x1b[0m from a worker"
    assert done.stdout.splitlines() == [
        "connecting to Ray",
        *[of_worker, FIRST[-1]],
        *[of_worker, "rollout 1/1 reward 0.500 (+0.000) 1.0 s"],
    ]
