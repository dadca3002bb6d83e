"""A long run in which something is killed again and again, beside the same run in peace: same learning, flat memory?

    python -m tests.chaos.soak --folder outputs/soak [--rollouts 2500] [--every 180] [--minutes 45] [--lone-engine]

The task is the quick start's (examples/tiny_cpu), from its SFT model, with two engines, or with --lone-engine with one
in the trainer's slot (another folder, please). Every `--every` seconds a part of the run is
killed, each of them once in five times, in random order: an engine, a trainer rank, the router, the rollout manager or
the driver, whose line is then given again (--resume auto). What was done is kept in the folder, so a call that was cut
goes on, also with more rollouts. It prints the row for
benchmarks/RESULTS.md and draws soak.png:

- reward: the mean of the last third of the rollouts of both runs. The difference has to be within three standard
  errors, which are those of the means of ten rollouts each: neighbours are alike.
- memory: of all processes of the run, right before each kill; the last third at most 10% above the first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from slime.processes.registry import MARK, processes_of
from tests.chaos.wounded_run import processes_of_part
from tests.integration.launch import ROOT

PARTS = ("engine", "trainer", "router", "manager", "driver")
REWARD, BLOCK, ERRORS, GROWTH = "rollout/raw_reward", 10, 3.0, 1.10
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rollouts", type=int, default=2500)
    parser.add_argument("--every", type=float, default=180.0, help="seconds between two kills")
    parser.add_argument("--minutes", type=float, default=45.0, help="after so many nothing more is killed")
    parser.add_argument("--lone-engine", action="store_true", help="one engine, colocated, in place of two")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    for name in ("in peace", "disturbed"):
        run(folder, name, options)
    sys.exit(report(folder))


def prepare(folder: Path) -> None:
    """The quick start's model after SFT, and its data."""
    if not (folder / "quick" / "sft" / "hf").is_dir():
        env = os.environ | {"OUTPUT": str(folder / "quick"), "GRPO_STEPS": "0", "SLIME_PYTHON": sys.executable}
        subprocess.run(["bash", "scripts/run-tiny-cpu.sh"], cwd=ROOT, env=env, check=True)


def flags_of(folder: Path, out: Path, rollouts: int, *, has_lone_engine: bool) -> list[Any]:
    """The quick start's GRPO run, with everything on that survives something."""
    quick, layout = folder / "quick", ["--colocate"] if has_lone_engine else ["--rollout-num-gpus", 2]
    return [
        "--accelerator", "cpu", "--seed", SEED, "--rollout-seed", SEED, "--hf-checkpoint", quick / "sft" / "hf",
        "--model-args-from-hf", "--prompt-data", quick / "data" / "train.jsonl", "--input-key", "prompt",
        "--label-key", "label", "--apply-chat-template", "--rollout-shuffle",
        "--custom-rm-path", "examples.tiny_cpu.reward:exact_match", "--advantage-estimator", "grpo",
        "--rollout-batch-size", 16, "--n-samples-per-prompt", 8, "--global-batch-size", 128,
        "--rollout-max-response-len", 5, "--rollout-temperature", 1, "--use-dynamic-batch-size",
        "--max-tokens-per-gpu", 8192, "--lr", 1e-4, "--lr-decay-style", "constant", "--weight-decay", 0,
        "--actor-num-gpus-per-node", 1, *layout, "--num-rollout", rollouts, "--output-dir", out,
        "--save", out / "saved", "--save-interval", 5, "--keep-checkpoints", 2, "--resume", "auto",
        "--use-fault-tolerance", "--rollout-health-check-interval", 2, "--rollout-health-check-timeout", 20,
        "--max-restarts", 1000, "--max-engine-restarts-per-hour", 1000, "--stall-timeout", 120,
    ]  # fmt: skip


def run(folder: Path, name: str, options: argparse.Namespace) -> None:
    """Do a run to its end, however often its line has to be given again."""
    out = folder / name.replace(" ", "_")
    if len(rewards_of(out)) >= options.rollouts:
        return
    out.mkdir(exist_ok=True)
    command = [
        sys.executable,
        ROOT / "train.py",
        *flags_of(folder, out, options.rollouts, has_lone_engine=options.lone_engine),
    ]
    begin = last_kill = time.monotonic()
    while True:
        with (out / "console.log").open("a") as log:
            driver = subprocess.Popen([str(part) for part in command], cwd=ROOT, stdout=log, stderr=log)
        while driver.poll() is None:
            time.sleep(1)
            is_on = name == "disturbed" and time.monotonic() - begin < 60 * options.minutes
            if is_on and time.monotonic() - last_kill >= options.every:
                last_kill = time.monotonic()
                kill(part_of_kill(len(kills_of(out))), driver.pid, out)
        if driver.returncode == 0:
            return
        if driver.returncode != -9:
            sys.exit(f"{name}: status {driver.returncode}, see {out}/console.log")


def part_of_kill(number: int) -> str:
    """Which part the kill of this number is for.

    Example:
        >>> sorted(part_of_kill(number) for number in range(5, 10)) == sorted(PARTS)
        True
    """
    round_number, place = divmod(number, len(PARTS))
    return random.Random(f"{SEED} {round_number}").sample(PARTS, len(PARTS))[place]


def kill(part: str, driver: int, out: Path) -> None:
    """Kill a part of the run, and note it with the run's memory before."""
    children = psutil.Process(driver).children()
    marks = [value for child in children if (value := _environment(child).get(MARK))]
    if not marks:
        return  # it is starting
    memory = sum(_resident(process) for process in [psutil.Process(driver), *processes_of(marks[0])])
    victims = [psutil.Process(driver)] if part == "driver" else processes_of_part(part, marks[0])
    for process in victims:
        process.kill()
    steps = (out / "metrics.jsonl").read_text().count('"train/loss"') if (out / "metrics.jsonl").is_file() else 0
    note = {"time": time.time(), "part": part, "killed": len(victims), "gb": memory / 1e9, "train_steps": steps}
    with (out / "kills.jsonl").open("a") as file:
        file.write(json.dumps(note) + "\n")


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def kills_of(out: Path) -> list[dict[str, Any]]:
    """What `kill` has noted."""
    path = out / "kills.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def rewards_of(out: Path) -> list[float]:
    """The reward of each rollout; of one that was done again, the last."""
    found: dict[int, float] = {}
    path = out / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.is_file() else []:
        record = json.loads(line)
        if REWARD in record:
            found[int(record["rollout/step"])] = record[REWARD]
    return [found[step] for step in sorted(found)]


def last_third(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of the last third, from the means of blocks.

    Example:
        >>> last_third([0.0] * 40 + [1.0] * 20)
        (1.0, 0.0)
    """
    tail = list(values)[-max(2 * BLOCK, len(values) // 3) :]
    blocks = [statistics.mean(tail[start : start + BLOCK]) for start in range(0, len(tail) - BLOCK + 1, BLOCK)]
    return statistics.mean(blocks), statistics.stdev(blocks) / len(blocks) ** 0.5


def report(folder: Path) -> int:
    """Print what was found; returns the exit status."""
    in_peace, disturbed = (rewards_of(folder / name) for name in ("in_peace", "disturbed"))
    (mean, error), (other, other_error) = last_third(in_peace), last_third(disturbed)
    kills = kills_of(folder / "disturbed")
    memory = [kill["gb"] for kill in kills]
    third = max(1, len(memory) // 3)
    growth = statistics.mean(memory[-third:]) / statistics.mean(memory[:third])
    bound = ERRORS * (error**2 + other_error**2) ** 0.5
    holds = abs(other - mean) <= bound and growth <= GROWTH and len(disturbed) == len(in_peace)
    by_part = ", ".join(f"{part} {sum(kill['part'] == part for kill in kills)}" for part in PARTS)
    print(f"rollouts: {len(in_peace)} in peace, {len(disturbed)} disturbed; kills: {by_part}")
    print(f"reward, last third: {mean:.3f} +- {error:.3f} in peace, {other:.3f} +- {other_error:.3f} disturbed")
    verdict = "holds" if holds else "DOES NOT HOLD"
    print(f"memory of the run before the kills: first third to last {growth:.2f} x; {verdict}")
    draw(folder / "soak.png", {"in peace": in_peace, "disturbed": disturbed}, [kill["train_steps"] for kill in kills])
    return int(not holds)


def draw(path: Path, curves: dict[str, list[float]], kills: Sequence[int]) -> None:
    """Reward by rollout, means of ten, and a line at each kill."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5))
    for name, values in curves.items():
        starts = range(0, len(values) - BLOCK + 1, BLOCK)
        axes.plot(list(starts), [statistics.mean(values[start : start + BLOCK]) for start in starts], label=name)
    for step in kills:
        axes.axvline(step, color="0.8", linewidth=0.8, zorder=0)
    axes.set(xlabel="rollout", ylabel="reward", title="The quick start's task with a random kill every three minutes")
    axes.legend()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
