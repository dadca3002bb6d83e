"""The same training in several layouts on 4 GPUs as on one: losses and gradient norms over 10 steps, from one dump.

    python benchmarks/gpu_multi_layouts.py [--only "TP 2 DP 2"]
    python benchmarks/gpu_multi_layouts.py --tiny                    two processes on the CPU

One run with an engine writes its rollouts down; every layout trains on them without engines. bf16 rounds differently
in each, and differences grow from step to step. How much is no fault is measured: one GPU with smaller
micro-batches beside one GPU. Target: over all steps, the mean relative difference of the gradient norm is at most 3
times that.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_models import TINY_MOE  # noqa: E402
from benchmarks.gpu_runs import (  # noqa: E402
    Row,
    Run,
    Series,
    colocated,
    folder_of,
    grpo_flags,
    line_of,
    make_parser,
    not_measured,
    parse_options,
    report,
    run_train,
    series_of,
    settled,
)

ROLLOUTS, FACTOR = 10, 3.0
NORM, LOSS = "train/grad_norm", "train/loss"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
DENSE = {
    "TP 2 DP 2": f"--actor-num-gpus-per-node 4 {TP}",
    "PP 2 DP 2": "--actor-num-gpus-per-node 4 --pipeline-model-parallel-size 2",
    "CP 2 DP 2": "--actor-num-gpus-per-node 4 --context-parallel-size 2",
}
EXPERTS = {"EP 2 DP 2": "--actor-num-gpus-per-node 2 --expert-model-parallel-size 2"}
ON_CPU = {"TP 2": f"--actor-num-gpus-per-node 2 {TP}", "DP 2": "--actor-num-gpus-per-node 2"}


def main() -> None:
    parser = make_parser(__doc__, "gpu_multi_layouts")
    parser.add_argument("--only", nargs="+", help="layouts, by name")
    options = parse_options(parser)
    models = {"tiny": ON_CPU} if options.tiny else {"0.6B": DENSE, TINY_MOE: EXPERTS}
    rows = [row for model, layouts in models.items() for row in rows_of(model, layouts, options)]
    sys.exit(report(rows, options))


def rows_of(model: str, layouts: dict[str, str], options: Namespace) -> list[Row]:
    """Record a model's rollouts, train on them in each layout and compare."""
    recorded, (tokens, fewer) = recording(model, options), (1024, 256) if options.tiny else (4096, 2048)
    if not run_train(recorded, options):
        return [not_measured("layout", model, "the curve of one GPU", "its rollouts could not be made")]
    dump = folder_of(recorded, options) / "rollout-{rollout_id}.pt"
    one, other = (replay(model, f"1, {size} tokens", f"--max-tokens-per-gpu {size}", dump) for size in (tokens, fewer))
    for run in (one, other):
        run_train(run, options)
    noise = difference(series_of(one, options), series_of(other, options))
    rows = []
    for name, flags in layouts.items():
        if options.only and name not in options.only:
            continue
        run = replay(model, name, f"--max-tokens-per-gpu {tokens} {flags}", dump)
        run_train(run, options)
        rows.append(judge(name, model, series_of(one, options), series_of(run, options), noise))
        print(line_of(rows[-1]), flush=True)
    return rows


def recording(model: str, options: Namespace) -> Run:
    """A run on one GPU that writes its rollouts down."""
    name = f"recorded-{model}"
    prompts, samples, response = (4, 4, 8) if options.tiny else (16, 8, 128)
    dump = options.output / "runs" / name / "rollout-{rollout_id}.pt"
    more = ["--save-debug-rollout-data", dump, *colocated(options)]
    return Run(
        name, model, grpo_flags(prompts=prompts, samples=samples, response=response, rollouts=ROLLOUTS, more=more)
    )


def replay(model: str, name: str, flags: str, dump: Path) -> Run:
    """Training on the recorded rollouts in a layout; two updates a rollout, so that the loss is not zero."""
    size = {"tiny": 16}.get(model, 128)
    fixed = ["--load-debug-rollout-data", str(dump), "--input-key", "prompt", "--rm-type", "random"]
    fixed += ["--num-rollout", str(ROLLOUTS), "--rollout-batch-size", str(size // (4 if model == "tiny" else 8))]
    fixed += ["--n-samples-per-prompt", "4" if model == "tiny" else "8", "--global-batch-size", str(size // 2)]
    fixed += ["--advantage-estimator", "grpo", "--lr", "1e-5", "--use-dynamic-batch-size"]
    folder = f"replayed-{model}-{name}".replace(" ", "_").replace(",", "")
    return Run(folder, model, (*fixed, *flags.split()))


def difference(one: Series, other: Series) -> float | None:
    """Mean over the steps of |a - b| / a, of the gradient norm; None where a run is not complete."""
    pairs = [settled(series, NORM, skip=0) for series in (one, other)]
    if not pairs[0] or len(pairs[0]) != len(pairs[1]):
        return None
    return statistics.mean(abs(a - b) / a for a, b in zip(*pairs, strict=True))


def judge(name: str, model: str, one: Series, other: Series, noise: float | None) -> Row:
    """The row of a layout."""
    what, target = f"gradient norm, {name} beside one GPU", f"<= {FACTOR:.0f} x the limit"
    found = difference(one, other)
    if found is None or noise is None:
        return not_measured(what, model, target, "a run did not log every step")
    losses = [settled(series, LOSS, skip=0) for series in (one, other)]
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
    note = (
        f"{len(losses[0])} steps; losses differ by at most {apart:.1e}, the largest is {max(map(abs, losses[0])):.1e}"
    )
    limit = f"{noise:.2e}, other micro-batches"
    return Row(
        what, model, f"{found:.2e}", limit, found / noise if noise else None, target, found <= FACTOR * noise, note
    )


if __name__ == "__main__":
    main()
