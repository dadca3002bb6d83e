"""Measure what the dashboard, all trackers, rollout records and Prometheus cost a step.

    nice -n -10 python benchmarks/observers.py [--steps 20] [--step-s 6] [--samples 64] [--tokens 1024]
    python benchmarks/observers.py --trackers wandb      # what one library costs; also "none"

A driver's loop with the real parts: each step logs the metrics of a rollout and of its training, then multiplies
matrices on all cores, as much each time, in place of generation and training. Steps with and without observers take
turns. With them, the step's samples are recorded, the five trackers (without a server) get its metrics, the dashboard
has the page Curves open (its stream, and its key curves at each event), and Prometheus scrapes. Without them, their
processes are stopped by SIGSTOP; what they missed they do in the next step with them, so all of their work counts.

Printed is the median over pairs of neighbouring steps of time with / time without, at most 1.01; and the CPU time of
the observers, as a share of what the machine has in a step, in all and of each part: it says more where the machine
does other work, too. Of this process that is logging (with alarms and the console) and the thread of the records.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.rollout_records import make_samples  # noqa: E402
from slime.checkpoints.rollout_files import samples_path  # noqa: E402
from slime.config.args import Args  # noqa: E402
from slime.config.parse import FLAG_CLASSES  # noqa: E402
from slime.config.parser import defaults_of  # noqa: E402
from slime.dashboard.address import start_beside_run  # noqa: E402
from slime.observability import logging_utils  # noqa: E402
from slime.observability.metric_table import FAMILIES  # noqa: E402
from slime.observability.rollout_records.recorder import SampleRecorder  # noqa: E402

LIMIT = 1.01
TRACKERS = ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")
SIZE = 1024  # of the matrices
CURVES = (
    *("rollout/raw_reward", "rollout/truncated_ratio", "rollout/zero_std/fraction"),
    *(f"rollout/response_len/{bound}" for bound in ("mean", "p10", "p90", "min", "max")),
    *("train/loss", "train/pg_loss", "train/entropy_loss", "train/kl_loss", "train/ppo_kl", "train/pg_clipfrac"),
    *("train/grad_norm", "train/train_rollout_logprob_abs_diff", "perf/step_time", "perf/tokens_per_gpu_per_sec"),
)  # what the page draws without a click
WARM_UP = 2
ByPart = defaultdict[str, float]


def make_args(directory: Path, trackers: Sequence[str]) -> Args:
    """The flags of a run with some trackers."""
    values: dict[str, Any] = {}
    for group in FLAG_CLASSES:
        values |= defaults_of(group)
    of_megatron = {"save": None, "load": None, "finetune": False, "global_batch_size": 64}
    own = {"output_dir": str(directory), "tracker": list(trackers), "wandb_mode": "offline", "keep_rollouts": "all"}
    own |= {"tb_project_name": str(directory / "tensorboard")}
    return cast(Args, SimpleNamespace(**(values | of_megatron | own)))


class Observers:
    """All of them, over a run in a directory; they are stopped until `resume`."""

    def __init__(self, directory: Path, trackers: Sequence[str]) -> None:
        self._directory, self.args = directory, make_args(directory, trackers)
        found: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("slime.dashboard.address")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logging_utils.init_tracking(self.args)
        start_beside_run(directory, "127.0.0.1", 0)
        address = re.search(r"dashboard: (\S+?)\?token=(\S+)", "\n".join(found))
        assert address is not None, found
        self._page, self._token = address[1], address[2]
        self._prometheus = free_port()
        command = [sys.executable, "-m", "slime.dashboard.prometheus", directory, "127.0.0.1", self._prometheus]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self._exporter = subprocess.Popen([str(word) for word in command], env=environment)
        self._recorder = SampleRecorder(self.args)
        self._processes: list[psutil.Process] = []
        self._cpu_s: dict[int, tuple[str, float]] = {}

    def started(self) -> None:
        """Wait until all of them answer, and hold the stream of events that an open page holds."""
        wait_for(self._scrape)
        run = wait_for(lambda: re.findall(r'"id":"([^"]+)"', self._get("api/runs")))[0]
        self._get(f"api/runs/{run}/metrics")
        threading.Thread(target=self._be_page, args=(run,), daemon=True).start()

    def _be_page(self, run: str) -> None:
        """Ask as js/pages/curves.js does: for what is new of its key curves, when there are new records."""
        named = "&".join(f"name={quote(name)}" for name in CURVES)
        records, after = 0, 0
        with contextlib.suppress(OSError), self._open(f"api/events?runs={run}") as events:
            for line in events:
                version = json.loads(line[6:])["version"] if line.startswith(b"data: ") else None
                if version is not None and version[0] != records:  # None where the run's directory is gone
                    records = version[0]
                    after = json.loads(self._get(f"api/runs/{run}/series?axis=step&after={after}&{named}"))["record"]

    def _open(self, path: str) -> Any:
        request = urllib.request.Request(self._page + path, headers={"authorization": f"Bearer {self._token}"})
        return urllib.request.urlopen(request, timeout=60)

    def _get(self, path: str) -> str:
        with self._open(path) as answer:
            return str(answer.read().decode())

    def _scrape(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._prometheus}/metrics", timeout=60) as answer:
            answer.read()
        return True

    def observe(self, step: int, samples: list[Any]) -> threading.Thread:
        """Record a rollout, as the rollout manager does; another thread scrapes, as Prometheus does."""
        with self._recorder.rollout(step, samples):
            pass  # the shares of the trainers are made here
        asking = threading.Thread(target=self._scrape)
        asking.start()
        return asking

    def has_recorded(self, step: int) -> bool:
        """Return whether the file of a rollout exists."""
        return samples_path(self._directory / "rollouts", step).exists()

    def resume(self) -> None:
        """Let their processes run."""
        self._send(signal.SIGCONT)

    def stop(self) -> None:
        """Stop all processes that are there, and note them."""
        self._processes = psutil.Process().children(recursive=True)
        self._send(signal.SIGSTOP)

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # a program that a tracker ran
                process.send_signal(number)

    def cpu_s(self) -> ByPart:
        """Seconds of CPU so far of each part."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._cpu_s[process.pid] = part_of(process), sum(process.cpu_times()[:2])
        found: ByPart = defaultdict(float)
        for part, seconds in self._cpu_s.values():
            found[part] += seconds
        for thread in threading.enumerate():
            if thread.name.startswith("rollout-records"):
                assert thread.ident is not None
                found["records"] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        return found

    def finish(self) -> None:
        """End them."""
        self.resume()
        self._recorder.finish(60)
        logging_utils.finish_tracking()
        self._exporter.terminate()
        self._exporter.wait(30)


def part_of(process: psutil.Process) -> str:
    """Return which observer a process is of."""
    words = " ".join(process.cmdline())
    for module in ("dashboard.prometheus", "dashboard", "observability.trackers.writer"):
        if f"slime.{module}" in words:
            return module.removeprefix("dashboard.").removeprefix("observability.").removesuffix(".writer")
    return f"trackers: {process.name()}"


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def wait_for(look: Any, within_s: float = 120.0) -> Any:
    """Return what `look` returns once that is something; it may raise OSError until then."""
    end = time.monotonic() + within_s
    while True:
        with contextlib.suppress(OSError):
            if found := look():
                return found
        if time.monotonic() > end:
            raise TimeoutError(f"nothing came within {within_s:g} s")
        time.sleep(0.2)


def metrics_of_step(rng: random.Random) -> Iterator[tuple[str, dict[str, float]]]:
    """(step key, metrics) of the records that a rollout logs: every metric with a fixed name."""
    names = [row.name for rows in FAMILIES.values() for row in rows if "<" not in row.name and "step" not in row.name]
    for key in ("rollout/step", "train/step"):
        family = key.partition("/")[0]
        yield (
            key,
            {name: 0.2 + 0.01 * rng.random() for name in names if name.startswith("train/") == (family == "train")},
        )


def work(times: int, matrix: np.ndarray) -> None:
    """Compute, as much each time."""
    for _ in range(times):
        matrix @ matrix


def measure(directory: Path, options: argparse.Namespace) -> tuple[list[float], list[float], list[ByPart]]:
    """Seconds of the steps with and without observers, and the share of the machine that each part took."""
    matrix, rng = np.random.default_rng(0).random((SIZE, SIZE)), random.Random(0)
    samples = make_samples(options.samples, options.tokens)
    begin = time.perf_counter()
    work(20, matrix)
    times = max(1, round(20 * options.step_s / (time.perf_counter() - begin)))
    observers = Observers(directory, [name for name in options.trackers if name != "none"])
    observers.started()
    logging_utils.begin_rollouts(2 * (options.steps + WARM_UP))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    shares = []
    for step in range(2 * (options.steps + WARM_UP)):
        is_watched = (step + step // 2) % 2 == 0  # with, without, without, with: a drift of the machine cancels out
        (observers.resume if is_watched else observers.stop)()
        before, begin = observers.cpu_s(), time.perf_counter()
        before["logging"] = time.thread_time()
        for key, metrics in metrics_of_step(rng):
            logging_utils.log(observers.args, {**metrics, key: step}, key)
        logging_utils.end_rollout(step)
        asking = observers.observe(step, samples) if is_watched else None
        logged_s = time.thread_time()
        work(times, matrix)
        seconds[is_watched].append(time.perf_counter() - begin)
        if asking is not None:
            asking.join()
            wait_for(lambda step=step: observers.has_recorded(step))
            after = observers.cpu_s() | {"logging": logged_s}
            of_machine = seconds[True][-1] * (os.cpu_count() or 1)
            spent = {part: (value - before[part]) / of_machine for part, value in after.items()}
            shares.append(defaultdict(float, spent))
    observers.finish()
    return seconds[True][WARM_UP:], seconds[False][WARM_UP:], shares[WARM_UP:]


def main() -> int:
    """Command line of this benchmark; 1 where a step takes more than 1% longer with the observers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of each kind")
    parser.add_argument("--step-s", type=float, default=6.0, help="seconds of a step")
    parser.add_argument("--samples", type=int, default=64, help="that a step records")
    parser.add_argument("--trackers", nargs="*", default=TRACKERS, help="the libraries")
    parser.add_argument("--tokens", type=int, default=1024, help="of each sample")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {"SWANLAB_MODE": "offline", "TRACKIO_DIR": f"{directory}/trackio", "WANDB_SILENT": "true"}
        watched, alone, shares = measure(Path(directory), options)
    ratio = statistics.median(a / b for a, b in zip(watched, alone, strict=True))
    print(f"{len(watched)} pairs of steps: with {statistics.median(watched):.3f} s, ", end="")
    print(f"without {statistics.median(alone):.3f} s, lowest {min(watched):.3f} and {min(alone):.3f} s")
    cpu = statistics.median(sum(share.values()) for share in shares)
    print(f"ratio {ratio:.4f} (at most {LIMIT}); CPU of the observers {cpu:.2%} of the machine's, on the average of:")
    for part in sorted({part for share in shares for part in share}):
        print(f"  {part} {statistics.mean(share[part] for share in shares):.3%}")
    print(f"load average {os.getloadavg()[0]:.1f}")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
