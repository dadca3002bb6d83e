"""FSDP2 beside Megatron on one GPU: the train step of the same packed batch, and a colocated run of FSDP2.

    python benchmarks/gpu_fsdp.py [--part steps] [--part run] [--profile 0]
    python benchmarks/gpu_fsdp.py --tiny

Steps: benchmarks/gpu_train_step.py (log-probs, then one update) of the 0.6B and the 4B shape with random weights, bf16
with fp32 masters, one process after the other: Megatron, `--train-backend fsdp`, and that with --fsdp-compile. Target:
the train part takes FSDP2 at most 1.10 times as long as Megatron. On a GPU of less than 100 GiB the 4B shape
recomputes its layers and logits. Where fsdp fails, it is tried once more with nothing fused (TORCHDYNAMO_DISABLE=1).

Run: GRPO of the 0.6B shape by train.py, trainer and engine in turn on the GPU. Targets: a gap between the log-probs of
engine and trainer of at most 0.02, at most 3 GB still held by the sleeping trainer, a checkpoint at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_log_prob_gap import GAP  # noqa: E402
from benchmarks.gpu_log_prob_gap import TARGET as GAP_TARGET  # noqa: E402
from benchmarks.gpu_runs import (  # noqa: E402
    Row,
    Run,
    Series,
    colocated,
    folder_of,
    grpo_flags,
    line_of,
    make_parser,
    median_of,
    not_measured,
    parse_options,
    report,
    run_train,
    series_of,
    settled,
)
from benchmarks.gpu_sleep_wake import HELD, residue_row  # noqa: E402

TARGET = 1.10
FSDP = "--train-backend fsdp"
WAYS = {"Megatron": "", "FSDP2": FSDP, "FSDP2, compiled": f"{FSDP} --fsdp-compile"}
"""Name -> flags; the first is what the others are compared with."""
SMALL_GPU_GIB = 100


def main() -> None:
    parser = make_parser(__doc__, "gpu_fsdp")
    parser.add_argument("--part", action="append", choices=["steps", "run"], help="default: both")
    parser.add_argument("--profile", type=int, default=25, help="also print so many of the dearest kernels of a step")
    options = parse_options(parser)
    parts = options.part or ["steps", "run"]
    options.benchmark = "-".join([options.benchmark, *(options.part or [])])
    small, large = ("tiny", None) if options.tiny else ("0.6B", "4B")
    rows = compared_steps(small, options) if "steps" in parts else []
    rows += colocated_run(options) if "run" in parts else []
    if "steps" in parts and large:
        rows += compared_steps(large, options)
    sys.exit(report(rows, options))


# ---- steps


def compared_steps(shape: str, options: Namespace) -> list[Row]:
    """A row for each way, printed as soon as it is there."""
    rows: list[Row] = []
    base: dict[str, float] | None = None
    for way, flags in WAYS.items():
        found, why = measured_step(shape, way, flags, options)
        if found is None and way == "FSDP2":
            rows.append(step_row(shape, way, None, base, why))
            way = f"{way}, nothing fused"
            found, why = measured_step(shape, way, flags, options, TORCHDYNAMO_DISABLE="1")
        rows.append(step_row(shape, way, found, base, why))
        print(line_of(rows[-1]), flush=True)
        base = found if way == "Megatron" else base
    return rows


def measured_step(
    shape: str, way: str, flags: str, options: Namespace, **env: str
) -> tuple[dict[str, float] | None, str]:
    """The figures of a call of gpu_train_step.py; or None, and the end of its output."""
    folder = options.output / "steps" / f"{shape}-{way}".replace(", ", "-").replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    if options.report and not result.is_file():
        return None, "not run"
    if not options.report:
        result.unlink(missing_ok=True)
        command = step_command(shape, flags, options, result)
        begin = time.monotonic()
        with (folder / "log").open("w") as log:
            output = {"stdout": log, "stderr": subprocess.STDOUT}
            try:
                subprocess.run(command, timeout=options.timeout, env=os.environ | env, cwd=ROOT, **output)
            except subprocess.TimeoutExpired:
                log.write("its time was over\n")
        print(f"{shape}, {way}: {time.monotonic() - begin:.0f} s (log {folder / 'log'})", flush=True)
        table = (folder / "log").read_text(errors="replace").partition("\n---")[2]
        print(table, flush=True)
    if result.is_file():
        return json.loads(result.read_text()), ""
    lines = [line.strip() for line in (folder / "log").read_text(errors="replace").splitlines() if line.strip()]
    return None, " / ".join(lines[-3:])[-400:]


def step_command(shape: str, flags: str, options: Namespace, result: Path) -> list[str]:
    """The call of gpu_train_step.py."""
    sizes: dict[str, Any] = {"tokens": 16384, "micro-batch-tokens": 16384, "steps": 6}
    if options.tiny:
        sizes = {"tokens": 256, "micro-batch-tokens": 256, "length": 128, "steps": 1}
    elif shape == "4B" and gpu_gib() < SMALL_GPU_GIB:
        sizes = {"tokens": 8192, "micro-batch-tokens": 4096, "steps": 3}
        more = "" if FSDP in flags else "--recompute-method uniform --recompute-num-layers 1"
        flags = f"{flags} --recompute-granularity full {more} --recompute-loss-function --log-probs-chunk-size 1024"
    elif shape == "4B":
        sizes = {"tokens": 16384, "micro-batch-tokens": 8192, "steps": 3}
    given = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    more_flags = ["--layout", f" {flags} {options.extra_flags}", "--accelerator", options.accelerator]
    more_flags += ["--profile", str(options.profile)]
    script = str(ROOT / "benchmarks/gpu_train_step.py")
    return [sys.executable, script, "--shape", shape, *given, *more_flags, "--result", str(result)]


def gpu_gib() -> float:
    """Memory of the first GPU, asked without taking any of it."""
    query = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    return float(found.stdout.split()[0]) / 1024


def step_row(shape: str, way: str, found: dict[str, float] | None, base: dict[str, float] | None, why: str) -> Row:
    """The row of a way; its ratio is its train part's time by Megatron's."""
    what, target = f"{way}: train step", "" if way == "Megatron" else f"<= {TARGET}"
    if found is None:
        return not_measured(what, shape, target, why)
    seconds, tokens = found["train"], found["tokens"]
    figure = f"{1e3 * seconds:.0f} ms, {tokens / seconds:.0f} tok/s, peak {found['memory_gib']:.1f} GiB"
    note = f"log-probs {1e3 * found['log-probs']:.0f} ms, whole {1e3 * found['whole']:.0f} ms"
    sized = f"{shape}, {tokens:.0f} tokens"
    if way == "Megatron":
        return Row(what, sized, figure, f"matmul {found['matmul_tflops']:.0f} TFLOP/s", None, "", True, note)
    if base is None:
        return Row(what, sized, figure, "", None, target, None, f"{note}; nothing to compare it with")
    ratio = seconds / base["train"]
    return Row(what, sized, figure, f"{1e3 * base['train']:.0f} ms", ratio, target, ratio <= TARGET, note)


# ---- the run


def colocated_run(options: Namespace) -> list[Row]:
    """Do the run; its rows."""
    model = "tiny" if options.tiny else "0.6B"
    prompts, samples, response = (4, 4, 16) if options.tiny else (32, 8, 256)
    save = options.output / "runs" / f"fsdp-{model}" / "checkpoints"
    more = [
        *colocated(options, tokens=16384, engine_share=0.4), *FSDP.split(),
        "--save", save, "--save-interval", 5, "--checkpoint-contents", "model", "optimizer", "rng", "hf",
    ]  # fmt: skip
    flags = grpo_flags(prompts=prompts, samples=samples, response=response, rollouts=5, more=more)
    run = Run(f"fsdp-{model}", model, flags)
    is_done = run_train(run, options)
    saved = sorted(path.name for path in save.glob("iter_*")) if is_done else []
    rows = judge(series_of(run, options), shape=f"{model}, {prompts} x {samples} x {response} tokens")
    log = folder_of(run, options) / "console.log"
    note = f"checkpoint {', '.join(saved)}" if saved else f"see {log}"
    rows.append(Row("colocated run: ended well", model, "5 rollouts", "", None, "status 0", bool(saved), note))
    for row in rows:
        print(line_of(row), flush=True)
    return rows


def judge(series: Series, *, shape: str) -> list[Row]:
    """Rows of the gap, of sleep and wake-up, and of what a sleeping trainer holds."""
    gaps = settled(series, GAP, 0)
    what, target = "colocated run: engine / trainer log-prob gap", f"<= {GAP_TARGET}"
    if not gaps:
        return [not_measured(what, shape, target, f"the run logged no {GAP}")]
    worst = max(gaps)
    parts = ("step", "rollout", "log_probs", "actor_train", "update_weights", "sleep", "wake_up")
    seconds = {part: median_of(series, f"perf/{part}_time") for part in parts}
    note = ", ".join(f"{part} {value:.3f} s" for part, value in seconds.items() if value is not None)
    return [
        Row(what, shape, f"{len(gaps)} steps, worst {worst:.5f}", "", worst, target, worst <= GAP_TARGET, note),
        residue_row(median_of(series, HELD), shape=shape),
    ]


if __name__ == "__main__":
    main()
