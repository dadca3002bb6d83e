"""Rollouts ahead on two GPUs: train_async.py beside train.py with the same trainer, engine and work.

    python benchmarks/gpu_multi_async.py
    python benchmarks/gpu_multi_async.py --tiny                      on the CPU: shows that it works

Qwen3-0.6B shape, random weights, 64 prompts x 8 samples of 512 tokens, trainer and engine on a GPU each; once with
GRPO alone, once with the reference model whose KL scripts/run-*.sh log (--use-kl-loss --kl-loss-coef 0), one pass more
for the trainer. Target: the median step of train.py takes at least 1.5 times that of train_async.py. What can be
gained at most is (generation + training) / the longer of the two, from train.py's own timers.
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

TARGET = 1.5
STEP, GENERATION, TRAINING = "perf/step_time", "perf/rollout_time", "perf/train_time"


def main() -> None:
    options = parse_options(make_parser(__doc__, "gpu_multi_async"))
    rows = []
    for with_reference in (False, True):
        runs = [step_run(driver, options, with_reference) for driver in ("train.py", "train_async.py")]
        for run in runs:
            run_train(run, options)
        shape = ("tiny" if options.tiny else "0.6B, 64 x 8 x 512 tokens") + ", with a reference" * with_reference
        rows.append(judge(*(series_of(run, options) for run in runs), shape=shape))
        print(line_of(rows[-1]), flush=True)
    sys.exit(report(rows, options))


def step_run(driver: str, options: Namespace, with_reference: bool) -> Run:
    """The run of a driver."""
    prompts, samples, response, rollouts = (2, 4, 16, 6) if options.tiny else (64, 8, 512, 8)
    model = "tiny" if options.tiny else "0.6B"
    more = apart(options, tokens=32768)
    if with_reference:
        weights = prepare_model(model, options.output / "models", device=options.accelerator)
        more += ["--use-kl-loss", "--kl-loss-coef", 0, "--kl-loss-type", "low_var_kl", "--ref-load", weights]
    flags = grpo_flags(prompts=prompts, samples=samples, response=response, rollouts=rollouts, more=more)
    return Run(f"apart-{Path(driver).stem}{'-reference' * with_reference}", model, flags, driver)


def judge(in_turn: Series, ahead: Series, *, shape: str) -> Row:
    """The row of both runs."""
    what, target = "train.py's step / train_async.py's", f">= {TARGET}"
    steps = [median_of(series, STEP) for series in (in_turn, ahead)]
    parts = [median_of(in_turn, name) for name in (GENERATION, TRAINING)]
    if None in (*steps, *parts):
        return not_measured(what, shape, target, "a run logged no step after its first two")
    slow, fast, generation, training = (float(value or 0) for value in (*steps, *parts))
    return Row(
        what,
        shape,
        f"{slow:.2f} s / {fast:.2f} s",
        f"{(generation + training) / max(generation, training):.2f}, generation {generation:.2f} s, "
        f"training {training:.2f} s",
        slow / fast,
        target,
        slow >= TARGET * fast,
        "medians after the first two steps",
    )


if __name__ == "__main__":
    main()
