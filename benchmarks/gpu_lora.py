"""LoRA on one GPU: what a sync takes, whether the adapter arrives, what training and decoding cost.

    python benchmarks/gpu_lora.py --output DIR
    python benchmarks/gpu_lora.py --tiny

Three colocated runs of train.py with random weights, in bf16, and the trainer alone:

1. the 4B shape with adapters of rank 32 that engines serve: the time of a sync and its parts, the distance between the
   log-probs of trainer and engine, beside the distance between the adapter's and the base's (by k3 KL). The engine
   gives its memory up for every training, so each of these log-probs comes from an engine that has woken;
2. the same with --lora-serve merged: tokens a second beside those with adapters;
3. a small model with experts, whose adapters the engine serves, while the first run starts;
4. a train step of the 4B shape with all weights, and with adapters: time and peak memory (gpu_train_step.py).

Runs are kept in DIR/runs; what has ended well is not repeated.
"""

from __future__ import annotations

import math
import re
import statistics
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_models import TINY_MOE  # noqa: E402
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
STEP = re.compile(r"^  whole +([\d.]+) ms  peak memory ([\d.]+) GiB", re.MULTILINE)


def main() -> None:
    parser = make_parser(__doc__, "gpu_lora")
    parser.add_argument("--steps", type=int, default=6, help="rollouts of a run")
    parser.add_argument("--skip", nargs="*", default=[], choices=["moe", "merged", "steps"], help="parts to leave out")
    options = parse_options(parser)
    adapters, experts = lora_run("adapter", options), moe_run(options)
    with ThreadPoolExecutor(1) as beside:
        waiting = None if "moe" in options.skip else beside.submit(run_train, experts, options)
        run_train(adapters, options)
        if waiting:
            waiting.result()
    series, shape = series_of(adapters, options), f"{adapters.model}, rank {rank_of(options)}"
    rows = [sync_row(series, shape), *arrival_rows(series, shape), wake_row(series, shape)]
    if waiting:
        what = "attention" if options.tiny else "all projections"
        rows += arrival_rows(series_of(experts, options), f"{TINY_MOE}, {what}")
    if "steps" not in options.skip:
        rows += step_rows(options, shape)
    if "merged" not in options.skip:
        merged = lora_run("merged", options)
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


def lora_run(serve: str, options: Namespace) -> Run:
    """The 4B shape, colocated."""
    prompts, samples, response = (4, 4, 16) if options.tiny else (16, 8, 256)
    model = "tiny" if options.tiny else "4B"
    more = [*colocated(options, tokens=4096, engine_share=0.45), *lora_flags(model, options), "--lora-serve", serve]
    flags = grpo_flags(prompts=prompts, samples=samples, response=response, rollouts=options.steps, more=more)
    return Run(f"lora-{serve}", model, flags)


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


def decode_rows(adapter: Series, merged: Series, shape: str) -> list[Row]:
    """Tokens a second of whole rollouts, and how exact merged weights are."""
    rates = [median_of(series, "perf/tokens_per_gpu_per_sec", skip=1) for series in (adapter, merged)]
    what = "rollout: tokens/s with adapters over merged weights"
    if rates[0] is None or rates[1] is None:
        return [not_measured(what, shape, "printed", "a run logged no rollout after its first")]
    figure = f"{rates[0]:.0f} / {rates[1]:.0f} tok/s"
    sync = median_of(merged, "perf/update_weights_time")
    note = "" if sync is None else f"a sync of merged weights {1e3 * sync:.0f} ms"
    row = Row(what, shape, figure, "", rates[0] / rates[1], "printed", True, note)
    return [row, *arrival_rows(merged, f"{shape}, merged")]


def step_rows(options: Namespace, shape: str) -> list[Row]:
    """A step of the trainer with adapters beside one with all weights."""
    sizes = ["--tokens", "16384", "--length", "1024", "--micro-batch-tokens", "2048", "--steps", "4", "--shape", "4B"]
    if options.tiny:
        sizes = ["--tokens", "1024", "--length", "128", "--micro-batch-tokens", "512", "--steps", "2"]
        sizes += ["--shape", "tiny", "--accelerator", "cpu"]
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    layouts = {"all weights": recompute, "adapters": f"{recompute} --lora-rank {rank_of(options)}"}
    measured = {name: one_step(options, name, [*sizes, f"--layout={layout}"]) for name, layout in layouts.items()}
    what = "train step of 16,384 tokens, adapters over all weights"
    if not all(measured.values()):
        failed = ", ".join(name for name, values in measured.items() if not values)
        return [not_measured(what, shape, "printed", f"no figures with {failed}: see {options.output}/step-*.log")]
    rows = []
    for number, unit in enumerate(("ms", "GiB")):
        full, ours = (values[number] for values in measured.values())
        name = what if unit == "ms" else "its peak memory"
        ratio = ours / full if full else None
        rows.append(Row(name, shape, f"{ours:.1f} / {full:.1f} {unit}", "", ratio, "printed", True, recompute))
    return rows


def one_step(options: Namespace, name: str, arguments: list[str]) -> tuple[float, ...]:
    """Milliseconds and GiB of a step; empty where it failed."""
    command = [sys.executable, str(ROOT / "benchmarks/gpu_train_step.py"), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return ()
    log = options.output / f"step-{name.replace(' ', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(done.stdout + done.stderr)
    matched = STEP.search(done.stdout)
    print(f"step with {name}: {matched[0].strip() if matched else done.stderr.strip()[-300:]}", flush=True)
    return tuple(map(float, matched.groups())) if matched else ()


if __name__ == "__main__":
    main()
