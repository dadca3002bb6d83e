"""A driver whose raylet is killed or stopped ends with its name, and nothing of its Ray is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launch import ROOT
from tests.integration.leftovers import MARK, Holdings

pytestmark = pytest.mark.timeout(120)
# What TrainingRun does around its schedule, with an actor that never answers in place of engines and trainers.
# (tests/chaos/test_shutdown.py has whole runs.)
DRIVER = """
import logging, sys, tempfile, time
from pathlib import Path
import ray
from slime.observability.phases import Phases
from slime.ray import supervisor
from slime.ray.supervisor import Supervisor
from slime.ray.utils import actor_env, get
from slime.processes.sweeper import RAY_PREFIX
supervisor.SILENT_S = 2.0
guard = Supervisor(Phases(), Path(sys.argv[1]), stall_timeout_s=0, on_stall="abort")
folder = Path(tempfile.mkdtemp(prefix=RAY_PREFIX, dir="/tmp"))  # sockets' paths must be short
options = {"num_cpus": 1, "object_store_memory": 10**8, "logging_level": logging.ERROR}
ray.init(address="local", include_dashboard=False, _temp_dir=str(folder / "ray"), **options)
guard.watch_ray(folder)
class Sleeper:
    def sleep(self, seconds):
        time.sleep(seconds)
sleeper = ray.remote(Sleeper).options(num_cpus=0, runtime_env={"env_vars": actor_env()}).remote()
get(sleeper.sleep.remote(0), "the actor", 60)
print("ready", flush=True)
try:
    get(sleeper.sleep.remote(600), "an actor that never answers", 600)
except Exception as error:
    print(guard.cause(error), flush=True)
guard.before_end()
guard.shut_ray_down()
guard.end(failed=True)
sys.exit(1)
"""


@pytest.mark.parametrize(
    ("number", "what"),
    [(signal.SIGKILL, "is gone"), (signal.SIGSTOP, "has been stopped (SIGCONT lets it go on) for 2 s")],
)
def test_a_driver_without_its_raylet_ends_and_says_so(number: signal.Signals, what: str, tmp_path: Path) -> None:
    mark = f"{os.getpid()}-{number}"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {MARK: mark}
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None and driver.stdout.readline() == "ready\n"
        holdings = Holdings(mark)
        holdings.look()
        raylet = next(one for one in holdings.processes.values() if one.name() == "raylet")
        raylet.send_signal(number)
        said = driver.stdout.read()
        assert driver.wait(60) == 1
    assert f"Ray's raylet (process {raylet.pid} on " in said and what in said
    assert holdings.wait_until_gone() == []
    log = tmp_path / "logs" / "ray" / "raylet.out"
    assert str(log) in said and log.is_file()
