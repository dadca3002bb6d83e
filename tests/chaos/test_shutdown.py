"""However a run ends, ten seconds later no process, port, shared memory or Ray session of it is left.

Each row starts train.py, waits for a phase, and ends the driver, or kills one of its children, as a machine that is
out of memory does. (SIGTERM while it trains is in the default tests: tests/integration/test_agreement_and_sync.py.)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.launch import ROOT, grpo_flags, log_tails, make_model, write_prompts
from tests.integration.leftovers import MARK, Holdings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NOTICED_S = 90.0

DRIVER = "the driver"
CHILDREN = {
    "the trainer": "ray::TrainRayActor",
    "the rollout manager": "ray::RolloutManager",
    "an engine's scheduler": "sglang::scheduler",
    "the raylet": "raylet",
    "the GCS": "gcs_server",
}
CULPRITS = {"the raylet": "Ray's raylet", "the GCS": "Ray's GCS"}
"""How the error begins that a run ends with when it has lost them."""
ROWS: list[tuple[str, str, signal.Signals, int]] = [
    ("start", DRIVER, signal.SIGINT, 130),
    ("start", DRIVER, signal.SIGTERM, 143),
    ("start", DRIVER, signal.SIGKILL, -9),
    ("start", "an engine's scheduler", signal.SIGKILL, 1),
    ("train", DRIVER, signal.SIGINT, 130),
    ("train", DRIVER, signal.SIGKILL, -9),
    ("train", "the trainer", signal.SIGKILL, 1),
    ("train", "the rollout manager", signal.SIGKILL, 1),
    ("train", "an engine's scheduler", signal.SIGKILL, 1),
    ("train", "the raylet", signal.SIGKILL, 1),
    ("train", "the raylet", signal.SIGSTOP, 1),
    ("train", "the GCS", signal.SIGKILL, 1),
    ("train", "the GCS", signal.SIGSTOP, 1),
]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    work = tmp_path_factory.mktemp("shutdown")
    return grpo_flags(make_model(work / "model"), write_prompts(work / "prompts.jsonl"))


class Launch:
    """A train.py that runs until it is ended."""

    def __init__(self, work: Path, flags: list[object], mark: str) -> None:
        self.work = work
        environment = {**os.environ, MARK: mark}
        environment.pop("RAY_ADDRESS", None)
        command = [sys.executable, "train.py", *map(str, flags), "--num-rollout", "100000", "--output-dir", str(work)]
        self.printed = (work / "printed").open("w")
        self.process = subprocess.Popen(
            [*command, "--rollout-num-gpus", "1"], cwd=ROOT, env=environment, stdout=self.printed, stderr=self.printed
        )

    def wait_for(self, phase: str, holdings: Holdings) -> None:
        """Wait until it starts (the engine and the trainer have processes) or trains."""
        metrics = self.work / "metrics.jsonl"

        def is_there() -> bool:
            if phase == "train":
                return metrics.exists() and "train/loss" in metrics.read_text()
            holdings.look()
            names = {one.name() for one in holdings.processes.values() if one.is_running()}
            return any(name.startswith("sglang::sch") for name in names)

        wait_until(lambda: is_there() or self.process.poll() is not None, 300)
        assert self.process.poll() is None, self.text()

    def text(self) -> str:
        return (self.work / "printed").read_text()[-3000:] + log_tails(self.work)


@pytest.fixture
def launch(flags: list[object], tmp_path: Path) -> Iterator[tuple[Launch, Holdings]]:
    mark = f"{os.getpid()}-{time.time_ns()}"
    launched, holdings = Launch(tmp_path, flags, mark), Holdings(mark)
    yield launched, holdings
    launched.printed.close()
    for process in [launched.process, *holdings.processes.values()]:  # of a test that has failed
        try:
            process.kill()
        except psutil.Error:
            continue


@pytest.mark.parametrize(("phase", "who", "how", "status"), ROWS)
def test_nothing_is_left(
    phase: str, who: str, how: signal.Signals, status: int, launch: tuple[Launch, Holdings]
) -> None:
    run, holdings = launch
    run.wait_for(phase, holdings)
    holdings.look()
    assert len(holdings.processes) > 5 and len(holdings.sessions) == 1
    victim = run.process.pid if who == DRIVER else pid_of(holdings, CHILDREN[who])
    os.kill(victim, how)
    begin = time.monotonic()
    code = run.process.wait(NOTICED_S)
    assert code == status, f"status {code}: {run.text()}"
    assert who not in CULPRITS or f"error: {CULPRITS[who]}" in run.text(), run.text()
    assert holdings.wait_until_gone() == [], f"the driver ended after {time.monotonic() - begin:.0f} s"


def pid_of(holdings: Holdings, title: str) -> int:
    for process in holdings.processes.values():
        if process.is_running() and " ".join(process.cmdline()).startswith(title) or process.name() == title:
            return process.pid
    raise AssertionError(f"there is no {title}")


def wait_until(condition: Callable[[], object], deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.2)
