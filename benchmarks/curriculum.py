"""Rollouts until 70 % on the quick start's task, with the curriculum and without, three seeds.

    python benchmarks/curriculum.py [--jobs 2] [--seeds 0 1 2] [--steps 70] [--prompts 640]
        [--only plain curriculum dynamic]

`dynamic` is the dynamic filter that drops groups of equal rewards, the other way to spend engines on useful groups: it
generates more responses for a rollout, so the last column counts responses, too. A curriculum knows only prompts that
come again, and all of the quick start's 9,750 last for 38 rollouts of 64 out of 256. Each run is one train.py command
line from one SFT model; a run that is complete in --output is not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import tiny_runs  # noqa: E402
from benchmarks.tiny_runs import TinyRun  # noqa: E402

LEVEL = 0.70
SAMPLES = 64 * 8  # of a rollout
FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters"
WAYS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "curriculum": ("--data-source-path", "slime.rollout.sampling.curriculum:CurriculumDataSource"),
    "dynamic": ("--dynamic-sampling-filter-path", f"{FILTERS}:check_reward_nonzero_std"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny_runs.add_options(parser, "curriculum")
    parser.add_argument(
        "--only", nargs="+", choices=WAYS, default=["plain", "curriculum"], help="ways to draw prompts"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of each way")
    parser.add_argument("--steps", type=int, default=70, help="rollouts of a run")
    parser.add_argument("--prompts", type=int, default=640, help="of the quick start's training file that are used")
    options = parser.parse_args()
    runs = [make_run(way, seed, options) for seed in options.seeds for way in options.only]
    problems = [] if options.report else tiny_runs.run_all(runs, options)
    if not options.only_run:
        rows = [row_of(way, options) for way in options.only]
        headers = [
            "",
            "seeds",
            f"rollouts to {LEVEL:.0%} (mean)",
            "of each seed",
            "final (mean)",
            "responses to it (mean)",
        ]
        tiny_runs.write_table(rows, headers, options.output / "table.md")
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(bool(problems))


def make_run(way: str, seed: int, options: argparse.Namespace) -> TinyRun:
    """One run, evaluated after every second rollout."""
    prompts = ("--prompt-data", f"{{start}}/data/train.jsonl@[0:{options.prompts}]")
    reward = ("--custom-rm-path", "examples.tiny_cpu.reward:exact_match")
    more = (*prompts, "--colocate", "--lr", "2e-4", *reward, *WAYS[way])
    return TinyRun(f"{way}-{seed}", tiny_runs.tiny_flags(*more, steps=options.steps, seed=seed, eval_interval=2))


def row_of(way: str, options: argparse.Namespace) -> list[str]:
    """A line of the table, of the runs that are complete; a seed that never reached the level has a dash."""
    runs = [make_run(way, seed, options) for seed in options.seeds]
    folders = [options.output / run.name for run in runs if tiny_runs.is_complete(run, options.output)]
    curves = [tiny_runs.read_curve(folder) for folder in folders]
    reached = [tiny_runs.first_step_at(curve, LEVEL) for curve in curves]
    there = [(step, folder) for step, folder in zip(reached, folders, strict=True) if step is not None]
    return [
        way,
        str(len(folders)),
        f"{mean(step for step, _ in there):.1f}" if there and len(there) == len(folders) else "-",
        ", ".join("-" if step is None else f"{step:.0f}" for step in reached),
        f"{mean(list(curve.values())[-1] for curve in curves):.1%}" if curves else "-",
        f"{mean(responses_until(folder, step) for step, folder in there):,.0f}" if there else "-",
    ]


def responses_until(folder: Path, rollouts: float) -> float:
    """Responses that were generated for the first rollouts, those of dropped groups included."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    dropped = {r["rollout/step"]: r["rollout/dropped_ratio"] for r in records if "rollout/dropped_ratio" in r}
    return sum(SAMPLES / (1 - dropped.get(step, 0.0)) for step in range(int(rollouts)))


if __name__ == "__main__":
    main()
