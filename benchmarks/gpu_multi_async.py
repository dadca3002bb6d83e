"""Rollouts ahead on two GPUs: train_async.py beside train.py with the same trainer, engine and work.

    python benchmarks/gpu_multi_async.py [--model 4B] [--case heavy-tailed]
    python benchmarks/gpu_multi_async.py --tiny                      on the CPU: shows that it works

Random weights of the 0.6B or the 4B shape, trainer and engine on a GPU each. Cases: 64 prompts x 8 samples of 512
tokens; the same with the reference model whose KL scripts/run-*.sh log (--use-kl-loss --kl-loss-coef 0), one pass more
for the trainer; 32 x 8 samples of log-normal lengths up to 8,192. What can be gained at most is (generation +
training) / the longer of the two, from train.py's own timers. Target: at least 95% of that. --driver does one of the
two runs alone, so that a host of four GPUs does both at once; --report reads them.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_models import prepare_model  # noqa: E402
from benchmarks.gpu_runs import (  # noqa: E402
    Row,
    Run,
    Series,
    apart,
    grpo_flags,
    line_of,
    make_parser,
    median_of,
    not_measured,
    parse_options,
    report,
    run_train,
    series_of,
)

TARGET = 0.95
CASES = ("plain", "reference", "heavy-tailed")
STEP, GENERATION, TRAINING = "perf/step_time", "perf/rollout_time", "perf/train_time"


def main() -> None:
    parser = make_parser(__doc__, "gpu_multi_async")
    parser.add_argument("--model", choices=["0.6B", "4B"], default="0.6B")
    parser.add_argument("--case", action="append", choices=CASES, help="default: plain and reference")
    parser.add_argument("--driver", action="append", choices=["train.py", "train_async.py"], help="default: both")
    options = parse_options(parser)
    rows = []
    for case in options.case or CASES[:2]:
        runs = [step_run(driver, options, case) for driver in ("train.py", "train_async.py")]
        for run in runs:
            if run.driver in (options.driver or [run.driver]):
                run_train(run, options)
        shape = f"{runs[0].model}, {case}"
        rows.append(judge(*(series_of(run, options) for run in runs), shape=shape))
        print(line_of(rows[-1]), flush=True)
    sys.exit(report(rows, options))


def step_run(driver: str, options: Namespace, case: str) -> Run:
    """The run of a driver."""
    prompts, samples, response, rollouts = (2, 4, 16, 6) if options.tiny else (64, 8, 512, 8)
    model = "tiny" if options.tiny else options.model
    more = apart(options, tokens=32768 if model != "4B" else 16384)
    if case == "reference":
        weights = prepare_model(model, options.output / "models", device=options.accelerator)
        more += ["--use-kl-loss", "--kl-loss-coef", 0, "--kl-loss-type", "low_var_kl", "--ref-load", weights]
    if case == "heavy-tailed":
        more += ["--custom-generate-function-path", "benchmarks.fixed_length.heavy_tailed"]
        prompts, response, rollouts = (2, 64, 6) if options.tiny else (32, 8192, 6)
    if model == "4B":
        more += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1]
    flags = grpo_flags(prompts=prompts, samples=samples, response=response, rollouts=rollouts, more=more)
    return Run(f"apart-{model}-{Path(driver).stem}-{case}", model, flags, driver)


def judge(in_turn: Series, ahead: Series, *, shape: str) -> Row:
    """The row of both runs."""
    what, target = "train.py's step / train_async.py's", f">= {TARGET} of the limit"
    steps = [median_of(series, STEP) for series in (in_turn, ahead)]
    parts = [median_of(in_turn, name) for name in (GENERATION, TRAINING)]
    if None in (*steps, *parts):
        return not_measured(what, shape, target, "a run logged no step after its first two")
    slow, fast, generation, training = (float(value or 0) for value in (*steps, *parts))
    gained, possible = slow / fast, (generation + training) / max(generation, training)
    limit = f"{possible:.2f}, generation {generation:.2f} s, training {training:.2f} s"
    note = f"{gained / possible:.2f} of what is possible; medians after the first two steps"
    return Row(what, shape, f"{slow:.2f} s / {fast:.2f} s", limit, gained, target, gained >= TARGET * possible, note)


if __name__ == "__main__":
    main()
