"""What stale tokens do to GRPO on the tiny task, and what each correction does where they hurt.

    python benchmarks/off_policy.py [--jobs 4] [--settings 8:2e-4 16:2e-4 32:2e-4 32:1e-3] [--seeds 0] [--steps 96]

A setting is INTERVAL:LR: train_async.py gives the engines new weights every INTERVAL rollouts, each rollout is one
update, so that its tokens are up to INTERVAL + 1 updates old.

1. Without a correction, at every setting; and fresh (INTERVAL 1) at every learning rate.
2. At the first setting, in the order given, where the uncorrected accuracy (mean over seeds) ends at least 5 points
   below the fresh one of that learning rate, or once falls by as much from where it was, else at the last one: TIS,
   IcePop, the engine's log-probs as the old ones alone (PPO's clip then bounds the step from the engine's policy) and
   with OPSM, and MIS (examples/train_infer_mismatch_helper/mis.yaml).

table.md and two plots (settings.png, corrections.png) show held-out accuracy and the largest
train/train_rollout_logprob_abs_diff. A run that is complete in --output is not repeated. The exit status is 1 where a
run is missing; that a correction helps is shown, not demanded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import tiny_runs  # noqa: E402
from benchmarks.tiny_runs import Curve, TinyRun  # noqa: E402

DEGRADED = 0.05
GAP = "train/train_rollout_logprob_abs_diff"
NONE, FRESH = "none", 1
BOUNDS = ("--tis-clip", "2", "--tis-clip-low", "0.5")
ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
ENGINE_IS_OLD = "--use-rollout-logprobs"
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "tis": ("--use-tis", *BOUNDS),
    "icepop": ("--use-tis", *BOUNDS, "--custom-tis-function-path", ICEPOP),
    "rollout-logprobs": (ENGINE_IS_OLD,),
    # it compares with the old log-probs: those of the trainer are of the same weights where a rollout is one update
    "opsm": (ENGINE_IS_OLD, "--use-opsm", "--opsm-delta", "1e-2"),
    "mis": ("--custom-config-path", "examples/train_infer_mismatch_helper/mis.yaml"),
}


@dataclass(frozen=True)
class Setting:
    """How stale tokens are, and how far an update goes."""

    interval: int
    lr: str

    @classmethod
    def parse(cls, text: str) -> Setting:
        """From INTERVAL:LR.

        Raises:
            argparse.ArgumentTypeError: it is none.
        """
        interval, _, lr = text.partition(":")
        try:
            setting = cls(int(interval), lr)
            valid = setting.interval >= 1 and float(lr) > 0
        except ValueError:
            valid = False
        if not valid:
            raise argparse.ArgumentTypeError(f"{text!r} is no setting; write INTERVAL:LR, as in 8:2e-4")
        return setting

    @property
    def fresh(self) -> Setting:
        """The same updates with new weights after each."""
        return Setting(FRESH, self.lr)

    def __str__(self) -> str:
        return f"interval {self.interval}, lr {self.lr}"


@dataclass(frozen=True)
class Line:
    """A line of the table: one correction at one setting, over the seeds."""

    setting: Setting
    correction: str
    runs: tuple[TinyRun, ...]

    @property
    def label(self) -> str:
        return f"{self.correction} ({self.setting})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny_runs.add_options(parser, "off_policy")
    grid = ["8:2e-4", "16:2e-4", "32:2e-4", "32:1e-3"]
    settings = [Setting.parse(text) for text in grid]
    parser.add_argument("--settings", nargs="+", type=Setting.parse, default=settings, metavar="INTERVAL:LR")
    parser.add_argument("--only", nargs="+", choices=list(CORRECTIONS), default=list(CORRECTIONS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=96, help="rollouts of a run")
    parser.add_argument("--at", type=Setting.parse, metavar="INTERVAL:LR", help="correct there, whatever degrades")
    options = parser.parse_args()
    lines = uncorrected(options)
    problems = run(lines, options)
    if chosen := options.at or choose(lines, options):
        corrected = [make_line(chosen, name, options) for name in options.only]
        problems += run(corrected, options)
        lines += corrected
    if not options.only_run:
        problems += report(lines, chosen, options.output)
    for problem in dict.fromkeys(problems):
        print(problem, file=sys.stderr)
    sys.exit(bool(problems))


def run(lines: Sequence[Line], options: argparse.Namespace) -> list[str]:
    """Do the runs of these lines that are not complete, unless only a report is asked for."""
    runs = [each for line in lines for each in line.runs]
    return [] if options.report else tiny_runs.run_all(runs, options)


def uncorrected(options: argparse.Namespace) -> list[Line]:
    """The lines of the first part: the longest runs first."""
    settings = [*options.settings, *([options.at] if options.at else [])]
    settings = list(dict.fromkeys([*(setting.fresh for setting in settings), *settings]))
    return [make_line(setting, NONE, options) for setting in settings]


def make_line(setting: Setting, correction: str, options: argparse.Namespace) -> Line:
    """The runs of one correction at one setting."""
    flags = CORRECTIONS.get(correction, ())
    runs = []
    for seed in options.seeds:
        more = (
            "--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1, "--update-weights-interval", setting.interval,
            "--lr", setting.lr, "--custom-rm-path", "examples.tiny_cpu.reward:exact_match",
            "--advantage-estimator", "grpo", *flags,
        )  # fmt: skip
        of_seed = tiny_runs.tiny_flags(*more, steps=options.steps, seed=seed, eval_interval=8)
        name = f"{correction}-{setting.interval}-{setting.lr}-{seed}"
        runs.append(TinyRun(name, of_seed, script="train_async.py", slots=2))
    return Line(setting, correction, tuple(runs))


def choose(lines: Sequence[Line], options: argparse.Namespace) -> Setting | None:
    """The first setting at which the uncorrected run degrades, else the last; None while runs are missing."""
    if not all(tiny_runs.is_complete(each, options.output) for line in lines for each in line.runs):
        return None
    by_setting = {line.setting: line for line in lines}
    for setting in options.settings:
        if degradation(by_setting[setting], by_setting[setting.fresh], options.output) >= DEGRADED:
            print(f"degrades: {setting}", flush=True)
            return setting
    print(f"no setting degrades; corrections at the last, {options.settings[-1]}", flush=True)
    return options.settings[-1]


def degradation(stale: Line, fresh: Line, output: Path) -> float:
    """How far the stale accuracy ends below the fresh one, or falls from where it was."""
    ends = [mean(map(last, curves_of(line, output))) for line in (fresh, stale)]
    return max(ends[0] - ends[1], mean(map(largest_drop, curves_of(stale, output))))


def curves_of(line: Line, output: Path, metric: str = tiny_runs.ACCURACY) -> list[Curve]:
    """A metric of each complete run of a line."""
    folders = (output / each.name for each in line.runs if tiny_runs.is_complete(each, output))
    return [tiny_runs.read_curve(folder, metric) for folder in folders]


def last(curve: Curve) -> float:
    """The value at the last step."""
    return list(curve.values())[-1]


def largest_drop(curve: Curve) -> float:
    """How far the curve is, at most, below an earlier value."""
    values = list(curve.values())
    return max(high - low for high, low in zip(accumulate(values, max), values, strict=True))


# ---- the report


def report(lines: Sequence[Line], chosen: Setting | None, output: Path) -> list[str]:
    """Write table.md and the plots of what is complete; returns a sentence for each run that is missing."""
    shown = [line for line in lines if curves_of(line, output)]
    if shown:
        headers = ["correction", "interval", "lr", "seeds", "start", "final", "largest drop", "largest gap (nats)"]
        tiny_runs.write_table([table_row(line, output) for line in shown], headers, output / "table.md")
        plot([line for line in shown if line.correction == NONE], output / "settings.png", "No correction")
        at = [line for line in shown if line.setting == chosen]
        if chosen is not None and at:
            fresh = [line for line in shown if line.setting == chosen.fresh and line.correction == NONE]
            plot([*fresh, *at], output / "corrections.png", f"Corrections at {chosen}")
    runs = (each for line in lines for each in line.runs)
    return [f"{each.name}: not complete" for each in runs if not tiny_runs.is_complete(each, output)]


def table_row(line: Line, output: Path) -> list[str]:
    """One line of the table."""
    curves = curves_of(line, output)
    gap = max((value for curve in curves_of(line, output, GAP) for value in curve.values()), default=float("nan"))
    start = mean(next(iter(curve.values())) for curve in curves)
    accuracies = [f"{value:.1%}" for value in (start, mean(map(last, curves)), mean(map(largest_drop, curves)))]
    name = "fresh" if line.setting.interval == FRESH else line.correction
    return [name, str(line.setting.interval), line.setting.lr, str(len(curves)), *accuracies, f"{gap:.3f}"]


def plot(lines: Sequence[Line], path: Path, title: str) -> None:
    """Accuracy of each line over the steps."""
    groups = {line.label: curves_of(line, path.parent) for line in lines}
    tiny_runs.plot_curves(groups, path, title=f"{title}: held-out accuracy on two-digit addition")
    print(f"plot: {path}")


if __name__ == "__main__":
    main()
