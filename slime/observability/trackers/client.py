"""The driver's side of the trackers: starts the writer process, passes on what it says, and ends it in time.

The driver gives it no records: the writer reads the files of the run. So a writer that hangs, is stopped or is killed
holds up nothing, and the next one goes on where it was.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from slime.config.args import Args
from slime.observability.trackers import (
    DELIVER_S,
    FINISH_S,
    FOLDER,
    KEYS,
    RUN_FILE,
    Place,
    TrackerRuns,
    count_left,
    end_of_files,
    goes_on,
    read_place,
    write_json,
)
from slime.observability.wandb_utils import public_config, upload_s
from slime.processes.directories import METRICS_FILE
from slime.processes.registry import exit_text
from slime.utils.http.api_keys import command_line_without_secrets

logger = logging.getLogger(__name__)

MODULE = "slime.observability.trackers.writer"
LOG = "trackers.log"
SILENT_S = 60.0  # a writer that says nothing for so long is stopped, or its host does not get to it
SILENT_AT_END_S = 20.0
RESTARTS_S = (1.0, 5.0, 30.0, 120.0, 600.0)  # pauses before it is started again
MARGIN_S = 15.0
END_S = 10.0  # between the end of its output, or a SIGKILL, and its own


class TrackerWriter:
    """The writer process of a run.

    Args:
        args: flags of the run.
        names: of its trackers.

    Raises:
        UsageError: WANDB_FINISH_TIMEOUT is no number of seconds.
    """

    def __init__(self, args: Args, names: Sequence[str]) -> None:
        self._directory, self._names = Path(args.output_dir).resolve(), list(names)
        self._finish_s = DELIVER_S + max(FINISH_S, upload_s() if "wandb" in names else 0.0) + MARGIN_S
        self._environment = dict(os.environ)
        if args.wandb_key and "wandb" in names:
            self._environment["WANDB_API_KEY"] = args.wandb_key  # it is in no file
        prepare(args, self._names)
        self._is_over, self._lock = threading.Event(), threading.Lock()
        self._has_warned = False
        self._heard = time.monotonic()
        self._process = self._start()
        self._thread = threading.Thread(target=self._watch, name="trackers", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Of the process that runs now, or has run last."""
        return self._process.pid

    def finish(self, *, failed: bool = False) -> None:
        """Let the writer deliver what is left, for a limited time, and say what is not delivered then."""
        self._is_over.set()
        with self._lock, contextlib.suppress(OSError):  # it is gone
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"status": "failed" if failed else "finished"}).encode() + b"\n")
            self._process.stdin.close()
        end = time.monotonic() + self._finish_s
        while self._thread.is_alive() and time.monotonic() < min(end, self._heard + SILENT_AT_END_S):
            self._thread.join(0.1)
        _kill(self._process)
        for name in self._names:
            if num_left := count_left(self._directory, name):
                logger.warning(
                    "--tracker %s lacks %d lines, which are in %s; a run that is resumed delivers them, and so does: "
                    "python -m %s %s", name, num_left, self._directory / METRICS_FILE, MODULE, self._directory,
                )  # fmt: skip

    def _start(self) -> subprocess.Popen[bytes]:
        log = self._directory / "logs" / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        root = str(Path(__file__).resolve().parent.parent.parent.parent)
        path = os.pathsep.join([root, *filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])])
        self._heard = time.monotonic()
        with log.open("ab") as output:
            # A session of its own: Ctrl-C at the terminal must not end it. It sees the driver's end on its stdin.
            return subprocess.Popen(
                [sys.executable, "-m", MODULE, str(self._directory), "--follow"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=self._environment | {"PYTHONPATH": path},
                start_new_session=True,
            )

    def _watch(self) -> None:
        """Pass on what it says, and start it again where it ends before the run does."""
        for pause_s in (*RESTARTS_S, None):
            self._listen()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            how = exit_text(_kill(self._process))
            if self._is_over.is_set():
                return
            again = "it is started again" if pause_s is not None else "it is not started again in this run"
            self._warn(f"the process of the trackers ended ({how}); {again}")
            if pause_s is None or self._is_over.wait(pause_s):
                return
            with self._lock:
                if self._is_over.is_set():
                    return
                self._process = self._start()

    def _listen(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        said = b""
        with selectors.DefaultSelector() as selector, pipe:
            selector.register(pipe, selectors.EVENT_READ)
            while True:
                if not selector.select(SILENT_S):
                    self._warn(f"the process of the trackers ({self.pid}) has said nothing for {SILENT_S:.0f} s")
                    continue
                if not (more := os.read(pipe.fileno(), 1 << 16)):
                    return
                self._heard = time.monotonic()
                *lines, said = (said + more).split(b"\n")
                for line in lines:
                    _pass_on(line)

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log = self._directory / "logs" / LOG
            logger.warning("%s; the run goes on, and what trackers lack is kept for them (log: %s)", text, log)


def prepare(args: Args, names: Sequence[str]) -> None:
    """Write what the writer has to know: the run, and where each tracker begins.

    A tracker of a run that goes on begins where it was; any other at what the run writes from now on.
    """
    directory, is_resumed = Path(args.output_dir), goes_on(args)
    runs = TrackerRuns(args.save, goes_on=is_resumed)
    run: dict[str, Any] = {"trackers": list(names), "is_resumed": is_resumed, "flags": public_config(args)}
    run["command_line"] = [sys.argv[0], *command_line_without_secrets(sys.argv[1:], vars(args))]
    write_json(directory / FOLDER / RUN_FILE, run)
    for name in names:
        place = read_place(directory, name) if is_resumed else None
        if place is None:
            place = Place(None, *end_of_files(directory))
        place.run = runs.known(KEYS.get(name, name)) if is_resumed else None
        place.write(directory, name)


def _pass_on(line: bytes) -> None:
    try:
        kind, text = json.loads(line)
    except ValueError:
        return
    if kind != "alive":
        logger.log(logging.WARNING if kind == "warning" else logging.INFO, "%s", text)


def _kill(process: subprocess.Popen[bytes]) -> int:
    """End it and what it has started, where it has not ended by itself; returns the exit code."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    return process.wait(END_S)
