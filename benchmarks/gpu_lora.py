"""LoRA on one GPU: what a sync takes, whether the adapter arrives, what training and decoding cost.

    python benchmarks/gpu_lora.py --output DIR
    python benchmarks/gpu_lora.py --tiny

Three colocated runs of train.py with random weights, in bf16, and the trainer alone:

1. the 4B shape with adapters of rank 32 that engines serve: the time of a sync and its parts, the distance between the
   log-probs of trainer and engine, beside the distance between the adapter's and the base's (by k3 KL). The engine
   gives its memory up for every training, so each of these log-probs comes from an engine that has woken;
2. the same engine without adapters, as merged weights need it, and no trainer: tokens a second beside those with
   adapters;
3. a small model with experts, whose adapters the engine serves, while the first run starts;
4. a train step of the 4B shape with all weights, and with adapters, in short and in long micro-batches: time and peak
   memory (gpu_train_step.py).

`--base fp8` converts the 4B shape, and the first run trains and serves adapters over it: engines round activations
and the trainer does not, so their log-probs lie further apart.

Runs are kept in DIR/runs; what has ended well is not repeated.
"""

from __future__ import annotations

import math
import re
import shlex
import statistics
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_models import TINY_MOE, prepare_model, run_python  # noqa: E402
from benchmarks.gpu_runs import (  # noqa: E402
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
    settled,
)

SYNC_S, GAP, ARRIVED = 0.050, 0.02, 0.25
"""Targets: of a sync, of the mean distance of log-probs, and of that distance over the adapter's own effect."""
PARTS = ("pack", "pause", "send")
STEP = re.compile(
    r"micro-batches of (\d+);.*?^  train +([\d.]+) ms.*?^  whole .*?peak memory ([\d.]+) GiB", re.MULTILINE | re.DOTALL
)


def main() -> None:
    parser = make_parser(__doc__, "gpu_lora")
    parser.add_argument("--steps", type=int, default=6, help="rollouts of a run")
    parser.add_argument("--skip", nargs="*", default=[], choices=["moe", "merged", "steps"], help="parts to leave out")
    parser.add_argument("--base", default="bf16", choices=["bf16", "fp8"], help="the weights under the first adapters")
    options = parse_options(parser)
    adapters, experts = lora_run(options), moe_run(options)
    with ThreadPoolExecutor(1) as beside:
        waiting = None if "moe" in options.skip else beside.submit(run_train, experts, options)
        run_train(adapters, options)
        if waiting:
            waiting.result()
    series, shape = series_of(adapters, options), f"{adapters.model} in {options.base}, rank {rank_of(options)}"
    rows = [sync_row(series, shape), *arrival_rows(series, shape), wake_row(series, shape)]
    if waiting:
        what = "attention" if options.tiny else "all projections"
        rows += arrival_rows(series_of(experts, options), f"{TINY_MOE}, {what}")
    if "steps" not in options.skip:
        rows += step_rows(options, shape)
    if "merged" not in options.skip:
        merged = plain_run(options)
        run_train(merged, options)
        rows += decode_rows(series, series_of(merged, options), shape)
    sys.exit(report(rows, options))


def rank_of(options: Namespace) -> int:
    """Return the rank of the adapters."""
    return 8 if options.tiny else 32


def lora_flags(model: str, options: Namespace) -> list[Any]:
    """A rate at which random rewards move the adapter far within a few steps, and its distance from the base."""
    flags: list[Any] = [
        "--lora-rank",
        rank_of(options),
        "--lr",
        "2e-3",
        "--ref-load",
        options.output / "models" / model,
    ]
    return [*flags, "--use-kl-loss", "--kl-loss-coef", "1e-4", "--kl-loss-type", "k3"]


def rollout_flags(options: Namespace, more: list[Any]) -> tuple[str, ...]:
    """Return the flags of the runs of the 4B shape."""
    prompts, samples, response = (4, 4, 16) if options.tiny else (16, 8, 256)
    if not options.tiny:
        more += ["--sglang-cuda-graph-bs-decode", prompts * samples]  # one graph in place of 20: a minute of the start
    return grpo_flags(prompts=prompts, samples=samples, response=response, rollouts=options.steps, more=more)


def lora_run(options: Namespace) -> Run:
    """The 4B shape, colocated, its adapters served."""
    model = "tiny" if options.tiny else "4B"
    more = [*colocated(options, tokens=4096, engine_share=0.45), *lora_flags(model, options)]
    if options.base == "fp8":
        base = options.output / "models" / f"{model}-fp8"
        if not base.exists() and not options.report:
            plain = prepare_model(model, options.output / "models", device=options.accelerator, gguf=options.gguf)
            block = ["--block-size", "16"] if options.tiny else []
            run_python("tools/convert_hf_to_fp8.py", "--model-dir", str(plain), "--save-dir", str(base), *block)
        more += ["--hf-checkpoint", base, "--ref-load", base]
    return Run(f"lora-{options.base}", model, rollout_flags(options, more))


def plain_run(options: Namespace) -> Run:
    """The engine of the same shape alone, without adapters."""
    engine = [] if options.tiny else shlex.split(options.engine_flags)
    more = ["--debug-rollout-only", "--rollout-num-gpus", 1, "--max-tokens-per-gpu", 4096, *engine]
    return Run("lora-plain", "tiny" if options.tiny else "4B", rollout_flags(options, more))


def moe_run(options: Namespace) -> Run:
    """A small model with experts; engines of a CPU have no kernel for theirs."""
    more = [*colocated(options, tokens=4096, engine_share=0.1), *lora_flags(TINY_MOE, options)]
    if options.tiny:
        more += ["--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj"]
    else:
        more += ["--sglang-cuda-graph-max-bs-decode", 8]  # the other requests go without a graph
    return Run("lora-moe", TINY_MOE, grpo_flags(prompts=4, samples=4, response=16, rollouts=4, more=more))


# ---- what the runs show


def sync_row(series: Series, shape: str) -> Row:
    """Packing, pause, load, continue."""
    what, target = "sync of an adapter, packing to continue", f"<= {1e3 * SYNC_S:.0f} ms"
    whole = settled(series, "perf/update_weights_time")
    if not whole:
        return not_measured(what, shape, target, "the run logged no sync after its first two")
    parts = {part: median_of(series, f"perf/update_weights_{part}_time") or 0.0 for part in PARTS}
    parts["rest"] = statistics.median(whole) - sum(parts.values())
    note = ", ".join(f"{part} {1e3 * seconds:.1f}" for part, seconds in parts.items())
    note += f" ms; {len(whole)} syncs, {1e3 * min(whole):.1f} to {1e3 * max(whole):.1f} ms"
    seconds = statistics.median(whole)
    return Row(what, shape, f"{1e3 * seconds:.1f} ms", "", None, target, seconds <= SYNC_S, note)


def arrival_rows(series: Series, shape: str) -> list[Row]:
    """Compare log-probs of engine and trainer, and how far the adapter moved them from the base."""
    gaps = [gap for _, gap in sorted(series.get("train/train_rollout_logprob_abs_diff", {}).items())]
    kls = [kl for _, kl in sorted(series.get("train/kl_loss", {}).items())]
    what, target = "trainer and engine: log-prob gap", f"mean <= {GAP}"
    if not gaps or not kls:
        return [not_measured(what, shape, target, "the run logged no train step")]
    moved = [math.sqrt(2 * max(kl, 0.0)) for kl in kls]  # k3 is about half the square of the distance
    each = ", ".join(f"{gap:.4f} / {far:.3f}" for gap, far in zip(gaps, moved, strict=True))
    mean = statistics.mean(gaps)
    of_moved = gaps[-1] / moved[-1] if moved[-1] else math.inf
    arrived = Row(
        "the same gap over the adapter's effect",
        shape,
        f"{gaps[-1]:.4f} of {moved[-1]:.3f}",
        "",
        of_moved,
        f"<= {ARRIVED}",
        of_moved <= ARRIVED,
        f"gap / effect at each step: {each}",
    )
    return [Row(what, shape, f"{mean:.4f}", "", None, target, mean <= GAP, f"{len(gaps)} steps"), arrived]


def wake_row(series: Series, shape: str) -> Row:
    """Report the seconds of sleep and wake-up. The rows of log-probs come from engines that have woken."""
    sleep, wake = median_of(series, "perf/sleep_time"), median_of(series, "perf/wake_up_time")
    what = "trainer's sleep + wake-up; rollouts by an engine that slept and woke"
    if sleep is None or wake is None:
        return not_measured(what, shape, "log-probs above", "the run logged no perf/sleep_time: nothing sleeps")
    used = {
        name.split("/")[1]: f"{median_of(series, name):.1f} GB" for name in sorted(series) if "gpu_used_gb" in name
    }
    note = f"the GPU's memory in use {used}; step {median_of(series, 'perf/step_time') or 0:.2f} s"
    return Row(what, shape, f"{sleep:.2f} + {wake:.2f} s", "", None, "log-probs above", True, note)


def decode_rows(adapter: Series, plain: Series, shape: str) -> list[Row]:
    """Tokens a second of whole rollouts."""
    rates = [median_of(series, "perf/tokens_per_gpu_per_sec", skip=1) for series in (adapter, plain)]
    what = "rollout: tokens/s with adapters over merged weights"
    if rates[0] is None or rates[1] is None:
        return [not_measured(what, shape, "printed", "a run logged no rollout after its first")]
    return [Row(what, shape, f"{rates[0]:.0f} / {rates[1]:.0f} tok/s", "", rates[0] / rates[1], "printed", True)]


def step_rows(options: Namespace, shape: str) -> list[Row]:
    """A step of the trainer with adapters beside one with all weights."""
    sizes = ["--tokens", "16384", "--length", "1024", "--micro-batch-tokens", "2048", "16384"]
    sizes += ["--steps", "3", "--shape", "4B"]
    if options.tiny:
        sizes = ["--tokens", "1024", "--length", "128", "--micro-batch-tokens", "512", "1024", "--steps", "1"]
        sizes += ["--shape", "tiny", "--accelerator", "cpu"]
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    layouts = {"all weights": recompute, "adapters": f"{recompute} --lora-rank {rank_of(options)}"}
    full, ours = (steps_of(options, name, [*sizes, f"--layout={layout}"]) for name, layout in layouts.items())
    what = "train step of 16,384 tokens, adapters over all weights"
    if not full or len(full) != len(ours):
        return [not_measured(what, shape, "printed", f"figures are missing: see {options.output}/step-*.log")]
    rows = []
    for size in full:
        for number, unit in enumerate(("ms", "GiB")):
            one, other = ours[size][number], full[size][number]
            name = f"{what if unit == 'ms' else 'its peak memory'}, micro-batches of {size}"
            figure, ratio = f"{one:.1f} / {other:.1f} {unit}", one / other if other else None
            rows.append(Row(name, shape, figure, "", ratio, "printed", True, recompute))
    return rows


def steps_of(options: Namespace, name: str, arguments: list[str]) -> dict[str, tuple[float, float]]:
    """Size of micro-batches -> milliseconds and GiB of a train step; empty where it failed."""
    command = [sys.executable, str(ROOT / "benchmarks/gpu_train_step.py"), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {}
    log = options.output / f"step-{name.replace(' ', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(done.stdout + done.stderr)
    found = {size: (float(ms), float(gib)) for size, ms, gib in STEP.findall(done.stdout)}
    print(f"step with {name}: {found or done.stderr.strip()[-300:]}", flush=True)
    return found


if __name__ == "__main__":
    main()
