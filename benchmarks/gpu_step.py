"""A whole colocated GRPO step on a GPU: how much of it is neither generation nor forward, backward and optimizer?

    python benchmarks/gpu_step.py [--model 0.6B] [--model SmolLM2-135M] [--model 4B]
    python benchmarks/gpu_step.py --tiny

64 prompts x 8 samples of 512 tokens each, one update a step, trainer and engine taking turns on the GPU, weights
synced after every step. Of a step's seconds (perf/step_time: from the end of one training to the end of the next) the
rollout (perf/rollout_time) and the passes of the trainer (log-probs, reference, actor_train) are work; the rest is
ours: offload (none where trainer and engine fit together; `--extra-flags=--offload-train` measures it), weight sync,
data between processes, the driver. Target: median share of the rest at most 3% of a step of 0.6B, 2% of 4B, else 8%.
Medians over the steps after the second. The engine's and the loop's part of a rollout: benchmarks/gpu_rollout.py.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_models import SMOLLM2  # noqa: E402
from benchmarks.gpu_runs import (  # noqa: E402
    WARM_UP,
    Row,
    Run,
    Series,
    colocated,
    grpo_flags,
    make_parser,
    median_of,
    not_measured,
    parse_options,
    report,
    run_train,
    series_of,
)

TARGETS, STEPS = {"0.6B": 0.03, "4B": 0.02}, 6
WORK = ("perf/rollout_time", "perf/log_probs_time", "perf/ref_log_probs_time", "perf/actor_train_time")
ENGINE_SHARE = {"0.6B": 0.4, SMOLLM2: 0.12, "4B": 0.35}
"""The engine's share of an H200's 150 GB. Its weights and the keys and values of all 512 x 576 tokens fit into it; the
latter take 34, 7 and 44 GB. At 4B a share of 0.42 would make the trainer leave."""
REST = (
    "perf/wake_up_time",
    "perf/sleep_time",
    "perf/update_weights_time",
    "perf/data_preprocess_time",
    "perf/save_model_time",
)
"""Parts of the rest that have a timer, for the note."""


def main() -> None:
    parser = make_parser(__doc__, "gpu_step")
    parser.add_argument("--model", action="append", choices=["0.6B", SMOLLM2, "4B"], help="default: the first two")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parse_options(parser)
    options.benchmark = "-".join([options.benchmark, *(options.model or [])])
    rows = []
    for model in ["tiny"] if options.tiny else options.model or ["0.6B", SMOLLM2]:
        run = step_run(model, options, steps=options.steps)
        run_train(run, options)
        rows.append(judge(series_of(run, options), model, shape_of(options)))
    sys.exit(report(rows, options))


def step_run(model: str, options: Namespace, *, steps: int = STEPS) -> Run:
    """The run of a model; benchmarks/gpu_weight_sync.py reads the same one."""
    prompts, samples, response = (4, 4, 16) if options.tiny else (64, 8, 512)
    tokens = {"4B": 8192}.get(model, 32768)
    more = colocated(options, tokens=tokens, engine_share=ENGINE_SHARE.get(model, 0.5), sleeps=False)
    return Run(
        f"step-{model}",
        model,
        grpo_flags(prompts=prompts, samples=samples, response=response, rollouts=steps, more=more),
    )


def shape_of(options: Namespace) -> str:
    """What a step is made of."""
    return "4 x 4 x 16 tokens" if options.tiny else "64 x 8 x 512 tokens"


def judge(series: Series, model: str, shape: str) -> Row:
    """The row of a run: the median share of what is not work."""
    what = "GRPO step: (step - generation - passes) / step"
    shares, target = rest_shares(series), TARGETS.get(model, 0.08)
    if not shares:
        return not_measured(what, f"{model}, {shape}", f"<= {target}", "the run logged no step after its first two")
    share = statistics.median(shares)
    parts = {name.removeprefix("perf/").removesuffix("_time"): median_of(series, name) for name in (*WORK, *REST)}
    note = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in parts.items() if seconds is not None)
    step = statistics.median(step_times(series))
    figure = f"{share * step:.3f} s of {step:.2f} s"
    return Row(what, f"{model}, {shape}", figure, "", share, f"<= {target}", share <= target, note)


def step_times(series: Series) -> list[float]:
    """Seconds of each step that counts."""
    found = series.get("perf/step_time", {})
    return [found[step] for step in sorted(found)[WARM_UP:]]


def rest_shares(series: Series) -> list[float]:
    """The share of each step, after the first ones, that is neither generation nor a pass of the trainer."""
    steps = series.get("perf/step_time", {})
    shares = []
    for rollout in sorted(steps)[WARM_UP:]:
        work = sum(series.get(name, {}).get(rollout, 0.0) for name in WORK)
        shares.append((steps[rollout] - work) / steps[rollout])
    return shares


if __name__ == "__main__":
    main()
