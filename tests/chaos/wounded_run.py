"""A driver that wounds its own run once: `python -m tests.chaos.wounded_run PART PHASE SIGNAL DRIVER FLAGS...`

It is train.py or train_async.py, whose own `train` it calls; what is added sends SIGNAL to the processes of one PART
of the run (`processes_of_part`: a whole part, or one process of an engine) in PHASE of rollout 1: `DELAY_S` after the
driver enters it, a scheduler for its sync right before, or, for log-probs, from a hook of the trainer. "start" is the
first phase there is, as soon as the part has processes. The moment is noted in wound.json in the output directory, and
where there is such a note, the run is left alone.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from slime.observability import phases
from slime.processes.registry import MARK, processes_of
from slime.ray import supervisor

ROLLOUT = 1
DELAY_S = {"generate": 0.3, "train": 0.2, "save": 0.02, "sync": 0.02, "eval": 0.2, "start": 1.0}
AFTER_TRAINING = ("save", "sync", "eval")
START_STALLS_S = 100.0
SERVER = ("engine_0.json",)
IN_COMMAND_LINE = {
    "engine": SERVER,
    "lone-engine": SERVER,
    "scheduler": ("sglang::scheduler",),
    "detokenizer": ("sglang::detokenizer",),
    "engine-actor": ("ray::EngineActor",),
    "router": ("router.json", "sglang::router"),  # before and after it has given itself a title
    "manager": ("ray::RolloutManager",),
    "trainer": ("ray::TrainRayActor",),
    "fsdp-trainer": ("ray::TrainRayActor",),
    "raylet": ("--raylet_socket_name=",),
}
AROUND_SERVER = ("engine", "lone-engine", "scheduler", "detokenizer", "engine-actor")


def processes_of_part(part: str, run: str) -> list[psutil.Process]:
    """The processes of a part of the run with this mark: an engine with all that it started, the last rank, ...

    None where the run has no such part (yet).
    """
    if part == "driver":
        return [psutil.Process(int(os.environ["CHAOS_DRIVER_PID"]))]
    if part == "reward":
        return [psutil.Process(int(os.environ["CHAOS_REWARD_PID"]))]
    everything = processes_of(run)
    if part in AROUND_SERVER:
        servers = [one for one in everything if is_of_part(one, "engine")]
        return [process for server in servers for process in _around_server(server, part)]
    return [one for one in everything if is_of_part(one, part)][-1:]


def _around_server(server: psutil.Process, part: str) -> list[psutil.Process]:
    """The first engine with all that it started, or the one process of it that the part is."""
    try:
        started, parents = server.children(recursive=True), server.parents()
    except psutil.NoSuchProcess:
        return []
    if part in ("engine", "lone-engine"):
        return [*started, server]
    return [one for one in [*started, *parents] if is_of_part(one, part)][:1]


def is_of_part(process: psutil.Process, part: str) -> bool:
    """Whether the process's command line is that of a part; not for the driver and the reward server."""
    try:
        command_line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(text in command_line for text in IN_COMMAND_LINE[part])


def wound(part: str, number: int, output_dir: Path) -> bool:
    """Send the signal to all processes of the part, unless that was done before; whether it was done now."""
    processes = processes_of_part(part, os.environ[MARK])
    if not processes:
        return False
    try:
        with (output_dir / "wound.json").open("x") as note:
            json.dump({"time": time.time(), "pids": [process.pid for process in processes]}, note)
    except FileExistsError:
        return False
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue
    return True


class Wounding(phases.Phases):
    """Phases that wound a part in one of them.

    Args:
        part: which. phase: when. number: of the signal. output_dir: of the run. more: as of `Phases`.
    """

    def __init__(self, part: str, phase: str, number: int, output_dir: Path, **more: Any) -> None:
        super().__init__(**more)
        self._row = (part, phase, number, output_dir)
        self._trained = 0

    @contextmanager
    def enter(self, name: str) -> Iterator[None]:
        part, phase, number, output_dir = self._row
        first = ROLLOUT + (name in AFTER_TRAINING)
        is_time = name == phase and (name == "start" or self._trained >= first)
        if is_time and (part, name) == ("scheduler", "sync"):
            wound(part, number, output_dir)  # behind its delay the sync of a tiny model is often over
        elif is_time and not (output_dir / "wound.json").exists():
            threading.Thread(target=self._wait_and_wound, daemon=True).start()
        with super().enter(name):
            yield
        self._trained += name == "train"

    def _wait_and_wound(self) -> None:
        part, phase, number, output_dir = self._row
        end = time.monotonic() + 60
        while not _has_begun(part) and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(DELAY_S[phase])
        wound(part, number, output_dir)


def _has_begun(part: str) -> bool:
    """Whether the run has its mark, which it is given early in its start, and this part."""
    return MARK in os.environ and bool(processes_of_part(part, os.environ[MARK]))


_passes = 0


def wound_before_log_probs(args: Any, model: Any, store_prefix: str) -> None:
    """A hook of the trainers (--custom-megatron-before-log-prob-hook-path)."""
    global _passes
    _passes += 1
    part, phase, name = os.environ["CHAOS_ROW"].split()
    if phase == "log-probs" and _passes == ROLLOUT + 1:
        wound(part, signal.Signals[name], Path(args.output_dir))


def main() -> None:
    part, phase, name, driver, *flags = sys.argv[1:]
    sys.argv = [driver, *flags]
    output_dir = Path(flags[flags.index("--output-dir") + 1])
    os.environ |= {"CHAOS_ROW": f"{part} {phase} {name}", "CHAOS_DRIVER_PID": str(os.getpid())}
    if (
        name == "SIGSTOP"
    ):  # the quarter of an hour that a start may be silent for is for models that take minutes to read
        supervisor.SLOW["start"] = START_STALLS_S
    from slime.ray import lifetime

    lifetime.Phases = lambda **more: Wounding(part, phase, signal.Signals[name], output_dir, **more)  # type: ignore[assignment,misc]
    schedule = importlib.import_module(Path(driver).stem)
    from slime.ray.driver import drive

    sys.exit(drive(schedule.train, check=getattr(schedule, "check", None)))


if __name__ == "__main__":
    main()
