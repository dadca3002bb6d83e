"""Does each estimator learn? Every one on the quick start's task, 3 seeds, controls that must not, and TRL's GRPO.

    python benchmarks/learning.py [--jobs 4] [--only grpo rloo] [--seeds 0 1 2] [--steps 70] [--trl-path DIR]

Each run is one train.py command line from one SFT model: 64 prompts x 8 samples a step, trained in 4 batches, so that
ratios of new and old probabilities differ from 1 and the losses differ. A run that is complete in --output is not
repeated. The table (table.md) and the plot (learning.png) show held-out accuracy (exact match at temperature 1, 250
problems x 4 samples). The exit status is 1, with the reasons, unless

    each estimator  ends, in the mean over its seeds, at least 15 points above where it started;
    each control    (random rewards, rewards of the opposite sign) ends at most 5 points above its start;
    every run       is complete, and all started alike, within 3 points.

TRL is shown beside them, not judged; without it (requirements-bench.txt) its run is left out with a line that says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import tiny_runs  # noqa: E402
from benchmarks.tiny_runs import Curve, TinyRun  # noqa: E402

GAIN, CONTROL_RISE, START_SPREAD = 0.15, 0.05, 0.03
LEVEL = 0.80
BATCH = 128  # of 512 samples a step
EXACT = ("--custom-rm-path", "examples.tiny_cpu.reward:exact_match")
FLIPPED = ("--custom-rm-path", "benchmarks.learning:opposite_of_exact_match")
LR = ("--lr", "2e-4")

ESTIMATORS: dict[str, tuple[str, ...]] = {
    "grpo": ("--advantage-estimator", "grpo"),
    "dr_grpo": (
        "--advantage-estimator", "grpo", "--disable-grpo-std-normalization",
        "--loss-agg-mode", "seq-mean-token-sum-norm",
    ),
    # the ratio of a whole sequence moves little: its clip range is small
    "gspo": ("--advantage-estimator", "gspo", "--eps-clip", "3e-3", "--eps-clip-high", "4e-3"),
    # bounded from above alone
    "cispo": ("--advantage-estimator", "cispo", "--eps-clip", "1", "--eps-clip-high", "2"),
    "rloo": ("--advantage-estimator", "rloo"),
    "reinforce_plus_plus": ("--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages"),
    "ppo": (
        "--advantage-estimator", "ppo", "--normalize-advantages",
        "--megatron-config-path", "benchmarks/ppo_roles.yaml",  # the critic's learning rate
    ),
}  # fmt: skip
CONTROLS: dict[str, tuple[str, ...]] = {"random": ("--rm-type", "random"), "flipped": FLIPPED}
TRL = "trl_grpo"
NAMES = [*ESTIMATORS, *CONTROLS, TRL]


async def opposite_of_exact_match(args: Namespace, sample: Any, **kwargs: Any) -> float:
    """The quick start's reward with the opposite sign, for the control."""
    from examples.tiny_cpu.reward import exact_match

    return -await exact_match(args, sample, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny_runs.add_options(parser, "learning")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the estimators; the others: first")
    parser.add_argument("--steps", type=int, default=70, help="rollouts of a run")
    parser.add_argument("--trl-path", help="folder with TRL installed (pip --target); else the environment")
    options = parser.parse_args()
    if options.steps < tiny_runs.EVAL_INTERVAL or options.steps % tiny_runs.EVAL_INTERVAL:
        parser.error(f"--steps {options.steps}: give a multiple of {tiny_runs.EVAL_INTERVAL}, when it is evaluated")
    runs = make_runs(options)
    problems: list[str] = []
    if not options.report:
        problems = tiny_runs.run_all(without_missing_trl(runs, options.trl_path), options)
    if not options.only_run:
        problems += report(runs, options.output)
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(bool(problems))


def make_runs(options: argparse.Namespace) -> dict[str, list[TinyRun]]:
    """The runs of each name that was asked for; TRL and the controls have one seed."""
    runs: dict[str, list[TinyRun]] = {}
    for name in options.only:
        seeds = options.seeds if name in ESTIMATORS else options.seeds[:1]
        runs[name] = [make_run(name, seed, options.steps) for seed in seeds]
    return runs


def make_run(name: str, seed: int, steps: int) -> TinyRun:
    """One run by the name of its line in the table."""
    folder = f"{name}-{seed}"
    if name == TRL:
        same = ("--start", "{start}", "--steps", str(steps), "--seed", str(seed), *LR)
        return TinyRun(folder, same, script="benchmarks/trl_learning.py")
    of_name = (*EXACT, *ESTIMATORS[name]) if name in ESTIMATORS else (*ESTIMATORS["grpo"], *CONTROLS[name])
    flags = tiny_runs.tiny_flags("--colocate", "--global-batch-size", BATCH, *LR, *of_name, steps=steps, seed=seed)
    return TinyRun(folder, flags)


def without_missing_trl(runs: Mapping[str, Sequence[TinyRun]], trl_path: str | None) -> list[TinyRun]:
    """All runs, seed by seed, so that a part of them shows every estimator; TRL's only where it is installed."""
    chosen = [run for name, of_name in runs.items() if name != TRL for run in of_name]
    chosen.sort(key=lambda run: int(run.name.rsplit("-", 1)[1]))  # stable: the order of the names stays
    if TRL not in runs:
        return chosen
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), trl_path]))
    env = {"PYTHONPATH": path} if path else {}
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('trl') is None)"
    if subprocess.run([sys.executable, "-c", look], env={**os.environ, **env}).returncode:
        print(f"{TRL}: left out, TRL is not installed (requirements-bench.txt; --trl-path)", flush=True)
        return chosen
    return chosen + [dataclasses.replace(run, env=env) for run in runs[TRL]]


# ---- the report


def report(runs: Mapping[str, Sequence[TinyRun]], output: Path) -> list[str]:
    """Write table.md and learning.png of the runs that are complete; returns what does not hold."""
    curves = {name: read_curves(of_name, output) for name, of_name in runs.items()}
    problems = [
        f"{run.name}: not complete" for name in runs if name != TRL for run in runs[name]
        if not tiny_runs.is_complete(run, output)
    ]  # fmt: skip
    shown = {name: of_name for name, of_name in curves.items() if of_name}
    if not shown:
        return problems
    headers = ["", "seeds", "start", "final (mean)", "final of each seed", f"steps to {LEVEL:.0%}", "gain (points)"]
    tiny_runs.write_table([table_row(name, shown[name]) for name in shown], headers, output / "table.md")
    title = "Held-out accuracy on two-digit addition: mean and range of the seeds"
    tiny_runs.plot_curves(shown, output / "learning.png", title=title)
    print(f"plot: {output / 'learning.png'}")
    return problems + judge(shown)


def read_curves(runs: Sequence[TinyRun], output: Path) -> list[Curve]:
    """The accuracy of each complete run."""
    return [tiny_runs.read_curve(output / run.name) for run in runs if tiny_runs.is_complete(run, output)]


def table_row(name: str, curves: Sequence[Curve]) -> list[str]:
    """One line of the table; a seed that never reached the level has a dash."""
    finals = [last(curve) for curve in curves]
    reached = [tiny_runs.first_step_at(curve, LEVEL) for curve in curves]
    return [
        name,
        str(len(curves)),
        f"{mean(map(first, curves)):.1%}",
        f"{mean(finals):.1%}",
        ", ".join(f"{final:.1%}" for final in finals),
        ", ".join("-" if step is None else f"{step:.0f}" for step in reached),
        f"{100 * gain(curves):+.1f}",
    ]


def judge(curves: Mapping[str, Sequence[Curve]]) -> list[str]:
    """A sentence for each thing that does not hold: estimators learn, controls do not, all start alike."""
    problems = []
    for name, of_name in curves.items():
        if name in ESTIMATORS and gain(of_name) < GAIN:
            problems.append(f"{name}: gained {100 * gain(of_name):.1f} points, must gain {100 * GAIN:.0f}")
        if name in CONTROLS and gain(of_name) > CONTROL_RISE:
            problems.append(f"{name}: must not learn, and rose by {100 * gain(of_name):.1f} points")
    starts = [first(curve) for name, of_name in curves.items() if name != TRL for curve in of_name]
    if starts and max(starts) - min(starts) > START_SPREAD:
        problems.append(f"the runs started between {min(starts):.1%} and {max(starts):.1%}: not from one model")
    return problems


def gain(curves: Sequence[Curve]) -> float:
    """Mean final accuracy minus mean accuracy at the start."""
    return mean(map(last, curves)) - mean(map(first, curves))


def first(curve: Curve) -> float:
    """The value at the first step."""
    return next(iter(curve.values()))


def last(curve: Curve) -> float:
    """The value at the last step."""
    return list(curve.values())[-1]


if __name__ == "__main__":
    main()
