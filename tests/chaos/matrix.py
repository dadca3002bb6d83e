"""Every part of a run, killed or stopped in every phase: does the run go on, or end at once with the reason?

    python -m tests.chaos.matrix --folder outputs/chaos [--only "trainer train"] [--seconds 3000]

A row is a run of train.py on CPU (a tiny model, two trainer ranks, two engines, a reward server; for "lone-engine" one
rank and one engine in the same slot), wounded once by `wounded_run`: a whole part, or one process of an engine. Rows
that are done are in <folder>/rows.jsonl and are not done again, so a call that was cut goes on. At the end the table
for benchmarks/RESULTS.md is printed. What is asked of a row:

- It ends: well, or with a reason that names what was wounded; well, where that was an engine that had started. A hang
  is a run that takes longer than `DEADLINE_S`.
- A driver that was killed is started once more with the same line (--resume auto), and has to end well. One that was
  stopped is let go on after `ASLEEP_S` seconds.
- A run that ends well has trained on every sample once: the ids in the dumps of its rollouts are those from 0 on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from slime.checkpoints.rollout_files import load_samples
from slime.ray.rollout.router import reserve_block
from tests.integration.launch import ROOT, grpo_flags, make_model, write_prompts

ENGINE_PARTS = ("engine", "lone-engine", "scheduler", "detokenizer", "engine-actor")
"""An engine with all its processes, one of two or the only one of a colocated run; or one process of one of two."""
FSDP = "fsdp-trainer"
"""A rank of a run with --train-backend fsdp."""
PARTS = (*ENGINE_PARTS, "trainer", FSDP, "router", "manager", "driver", "reward", "raylet")
PHASES = ("start", "generate", "log-probs", "train", "sync", "save", "eval")
SIGNALS = ("SIGKILL", "SIGSTOP")
NUM_ROLLOUT, PROMPTS, SAMPLES = 3, 4, 4
DEADLINE_S, ASLEEP_S = 420.0, 15.0
PATIENT_PARTS = ("router", "lone-engine", "scheduler", "engine-actor", "raylet")
STALL_S = dict.fromkeys(PARTS, 20) | dict.fromkeys(PATIENT_PARTS, 120)
"""After which the watchdog ends a run with a part that is stopped. A router is asked for half a minute before it is
started again, a weight sync waits a minute for a scheduler, a lost engine's actor or a raylet half a minute. What
is gone is noticed without the watchdog, which then must not take the start of a part on a slow machine for a stall."""
GONE_REWARD_S = 240
"""The same where a reward server is gone: its requests are sent ten times, for more than two minutes, before the run
ends with its name. (One that is stopped may answer for 20 minutes; nobody sees what becomes of another's server.)"""
REASONS = {
    **dict.fromkeys(ENGINE_PARTS, r"engine|sglang"),
    "trainer": r"rank|trainer",
    FSDP: r"rank|trainer",
    "router": r"router",
    "manager": r"rollout manager|RolloutManager",
    "driver": r"",
    "reward": r"reward service",
    "raylet": r"Ray's raylet",
}
"""What the last error of a run that stopped has to say, paths left out: it names what was wounded."""
OF_STOPPED_REWARD = r"nothing has gone on"


@dataclass(frozen=True)
class Row:
    """What is wounded, when and how."""

    part: str
    phase: str
    signal: str

    @property
    def name(self) -> str:
        """As --only takes it."""
        return f"{self.part} {self.phase} {self.signal}"


@dataclass
class Outcome:
    """What became of a row.

    Attributes:
        outcome: "recovered", "resumed" (the driver's line was given again), "stopped", "hang", "not wounded" (the run
            ended first) or "wrong": it ended well without all of its samples.
        reason: the last error that was printed.
        noticed_s: from the wound to the first warning or error.
        productive_s: from the wound to the next train step that follows a warning, or to the end of the run.
        holds: whether that is good.
    """

    part: str
    phase: str
    signal: str
    outcome: str
    reason: str
    noticed_s: float | None
    productive_s: float | None
    holds: bool


def all_rows() -> list[Row]:
    """The matrix."""
    rows = [Row(part, phase, name) for part in PARTS for phase in PHASES for name in SIGNALS]
    return [row for row in rows if (row.part, row.phase) != (FSDP, "log-probs")]  # it has no hook there


def prepare(folder: Path) -> None:
    """Make the model and the prompts of a folder, once."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "prompts.jsonl").exists():
        make_model(folder / "model")
        write_prompts(folder / "prompts.jsonl")


def outcome_of(row: Row, folder: Path) -> Outcome:
    """What became of a row of a prepared folder; it is done now unless it was before."""
    path = folder / "rows.jsonl"
    if (known := read_outcomes(path).get(row.name)) is not None:
        return known
    of_row = folder / row.name.replace(" ", "-")
    shutil.rmtree(of_row, ignore_errors=True)  # of a call that was cut in the middle of it
    found = run_row(row, of_row, model=folder / "model", prompts=folder / "prompts.jsonl")
    with path.open("a") as file:
        file.write(json.dumps(asdict(found)) + "\n")
    return found


# ---- one row


class _Watched:
    """A running driver: its lines and its train steps, with the time at which they were seen."""

    def __init__(self, command: Sequence[str], env: dict[str, str], metrics: Path) -> None:
        self._metrics = metrics
        self.lines: list[tuple[float, str]] = []
        self.steps: list[float] = []
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip()))

    def wait(self, deadline: float, each: Any) -> int | None:
        """The exit status, None at the deadline; `each` is called several times a second."""
        while (status := self.process.poll()) is None and time.time() < deadline:
            self._count_steps()
            each()
            time.sleep(0.1)
        self._count_steps()
        if status is not None:
            self._reader.join(10)
        return status

    def _count_steps(self) -> None:
        found = self._metrics.read_text().count('"train/loss"') if self._metrics.is_file() else 0
        self.steps += [time.time()] * (found - len(self.steps))


def run_row(
    row: Row, folder: Path, *, model: Path, prompts: Path, script: str = "train.py", more: Sequence[Any] = ()
) -> Outcome:
    """Do a row in an empty folder; `more` are flags of its run, such as those of a GPU."""
    out = folder / "out"
    out.mkdir(parents=True)
    with reward_server() as (url, pid):
        flags = [str(flag) for flag in [*flags_of(row, out, model, prompts, url), *more]]
        command = [sys.executable, "-m", "tests.chaos.wounded_run", row.part, row.phase, row.signal, script, *flags]
        env = {**os.environ, "CHAOS_REWARD_PID": str(pid)}
        for name in ("RAY_ADDRESS", "SLIME_API_KEY"):
            env.pop(name, None)
        deadline = time.time() + DEADLINE_S
        first = _Watched(command, env, out / "metrics.jsonl")
        status = first.wait(deadline, lambda: wake_driver(row, out))
        second = None
        if (row.part, row.signal) == ("driver", "SIGKILL") and status not in (None, 0):
            second = _Watched(command, env, out / "metrics.jsonl")
            status = second.wait(deadline + DEADLINE_S / 2, lambda: None)
        for number, watched in enumerate(filter(None, (first, second))):
            if watched.process.poll() is None:
                watched.process.kill()
            (out / f"printed_{number}").write_text("\n".join(line for _, line in watched.lines))
    return judge(row, out, first, second, status)


def flags_of(row: Row, out: Path, model: Path, prompts: Path, url: str) -> list[Any]:
    """Two trainer ranks and two engines, or one engine in the slots of one rank, with everything on that survives
    something."""
    grpo = grpo_flags(model, prompts)
    layout: list[Any] = ["--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 2]
    if row.part == "lone-engine":
        layout = ["--actor-num-gpus-per-node", 1, "--colocate"]
    hook = grpo.index("--custom-rm-path")
    wound = ["--custom-megatron-before-log-prob-hook-path", "tests.chaos.wounded_run:wound_before_log_probs"]
    return [
        *grpo[:hook], *grpo[hook + 2 :], "--output-dir", out, *layout,
        "--num-rollout", NUM_ROLLOUT, "--rm-type", "remote_rm", "--rm-url", url,
        "--use-fault-tolerance", "--rollout-health-check-interval", 1, "--rollout-health-check-timeout", 10,
        "--max-restarts", 1, "--save", out / "saved", "--save-interval", 1, "--resume", "auto",
        "--stall-timeout", stall_s_of(row), "--save-debug-rollout-data", out / "rollouts" / "{rollout_id}.pt",
        "--eval-prompt-data", "digits", prompts, "--eval-interval", 1, "--n-samples-per-eval-prompt", 1,
        "--skip-eval-before-train", "--distributed-timeout-minutes", 1,
        *(("--train-backend", "fsdp") if row.part == FSDP else wound),
    ]  # fmt: skip


def wake_driver(row: Row, out: Path) -> None:
    """Let a stopped driver go on, as a laptop that was opened again."""
    note = out / "wound.json"
    if (row.part, row.signal) == ("driver", "SIGSTOP") and note.is_file() and (text := note.read_text()):
        wound = json.loads(text)
        if time.time() - wound["time"] > ASLEEP_S and psutil.pid_exists(wound["pids"][0]):
            os.kill(wound["pids"][0], signal.SIGCONT)


@contextmanager
def reward_server() -> Iterator[tuple[str, int]]:
    """A process that scores responses; yields its address and its number."""
    ports = reserve_block("127.0.0.1")
    process = subprocess.Popen([sys.executable, "-m", "tests.chaos.reward_server", str(ports[0])], cwd=ROOT)
    try:
        yield f"http://127.0.0.1:{ports[0]}/score", process.pid
    finally:
        process.kill()
        process.wait(10)
        ports.release()


# ---- what became of it


def stall_s_of(row: Row) -> int:
    """--stall-timeout of a row."""
    if row.signal == "SIGSTOP":
        return STALL_S[row.part]
    return GONE_REWARD_S if row.part == "reward" else int(DEADLINE_S)


def reason_of(row: Row) -> str:
    """What has to be found in the reason of a row that stopped."""
    return OF_STOPPED_REWARD if (row.part, row.signal) == ("reward", "SIGSTOP") else REASONS[row.part]


def judge(row: Row, out: Path, first: _Watched, second: _Watched | None, status: int | None) -> Outcome:
    """Look at what a row left."""
    note = out / "wound.json"
    if not note.is_file():
        return Outcome(**asdict(row), outcome="not wounded", reason=last_error(first), noticed_s=None,
                       productive_s=None, holds=False)  # fmt: skip
    at = json.loads(note.read_text())["time"]
    last = second or first
    noticed = next((t for t, line in first.lines if t > at and re.search(r"WARNING|ERROR|error:", line)), None)
    if second is not None and second.lines:
        noticed = second.lines[0][0]
    steps = [t for t in last.steps if t > (noticed or at)]
    productive = steps[0] - at if steps else None
    reason, wrong = last_error(last), wrong_samples(out) if status == 0 else ""
    if status is None:
        outcome, holds = "hang", False
    elif status == 0:
        outcome, holds = ("wrong", False) if wrong else ("resumed" if second else "recovered", True)
    else:
        names_it = bool(reason) and bool(re.search(reason_of(row), re.sub(r"/\S+", "", reason)))
        outcome, holds = "stopped", names_it and (row.part not in ENGINE_PARTS or row.phase == "start")
    return Outcome(
        **asdict(row),
        outcome=outcome,
        reason=wrong or (reason if outcome != "recovered" else ""),
        noticed_s=None if noticed is None else round(noticed - at, 1),
        productive_s=None if productive is None else round(productive, 1),
        holds=holds,
    )


def last_error(watched: _Watched) -> str:
    """The sentence with which a run ended."""
    errors = [line for _, line in watched.lines if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else ""


def wrong_samples(out: Path) -> str:
    """What is wrong with the samples that were trained on; empty where each was there once."""
    found = sorted(
        int(sample.index or 0)
        for rollout_id in range(NUM_ROLLOUT)
        for sample in load_samples(out / "rollouts" / f"{rollout_id}.pt", option="the dump")
    )
    return "" if found == list(range(NUM_ROLLOUT * PROMPTS * SAMPLES)) else f"samples trained on: {found}"


# ---- the table


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Rows that are done, by name."""
    lines = path.read_text().splitlines() if path.is_file() else []
    found = [Outcome(**json.loads(line)) for line in lines]
    return {Row(one.part, one.phase, one.signal).name: one for one in found}


def table(outcomes: dict[str, Outcome]) -> str:
    """A line a part and phase, the two signals beside each other."""
    lines = ["| part | phase | killed | stopped |", "|---|---|---|---|"]
    for part, phase in dict.fromkeys((row.part, row.phase) for row in all_rows()):
        cells = [_cell(outcomes.get(Row(part, phase, name).name)) for name in SIGNALS]
        lines.append(f"| {part} | {phase} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def _cell(found: Outcome | None) -> str:
    if found is None:
        return "not done"
    times = [f"{value:.0f} s" for value in (found.noticed_s, found.productive_s) if value is not None]
    reason = f": {found.reason[:120]}" if found.reason else ""
    return f"{'' if found.holds else '**'}{found.outcome}{'' if found.holds else '**'} ({', '.join(times)}){reason}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[""], help='rows whose name begins so, e.g. "engine sync"')
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after so many")
    options = parser.parse_args()
    folder = options.folder.resolve()
    prepare(folder)
    done, begin = read_outcomes(folder / "rows.jsonl"), time.monotonic()
    for row in all_rows():
        is_wanted = any(row.name.startswith(prefix) for prefix in options.only)
        if not is_wanted or row.name in done or time.monotonic() - begin > options.seconds:
            continue
        done[row.name] = outcome_of(row, folder)
        print(f"{row.name}: {_cell(done[row.name])}", flush=True)
    print(table(done))
    sys.exit(int(not all(one.holds for one in done.values())))


if __name__ == "__main__":
    main()
