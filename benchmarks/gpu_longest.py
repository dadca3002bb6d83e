"""The longest sequence that trains within a budget of GPU memory, beside the length that the plan says.

    python benchmarks/gpu_longest.py [--shape 0.6B] [--budget GIB] [--cases NAME ...]
    python benchmarks/gpu_longest.py --tiny

The trainer of a run alone (no engine, random weights, one GPU) trains on one sequence of 64 prompt tokens and a
response. The plan says which length needs just the budget; the trainer trains on that length, and then on others until
torch's peak of allocated memory is within half a percent of the budget. Each way to save memory (`CASES`) is a process
of its own; as many as the GPU has room for run at once. Target: the plan's length within 3% of the measured one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_fsdp import gpu_gib  # noqa: E402
from benchmarks.gpu_runs import Row, line_of, make_parser, not_measured, parse_options, report  # noqa: E402
from benchmarks.gpu_train_step import flags, make_share, one_rollout, start_trainer, write_config  # noqa: E402

TARGET, CLOSE, TRIES, PROMPT, STEP = 0.03, 0.005, 5, 64, 32
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
DEFERRED = "--recompute-loss-function --log-probs-chunk-size 1024"
CASES = {
    "nothing": "",
    "selective": "--recompute-granularity selective",
    "full": FULL,
    "deferred logits": DEFERRED,
    "full, deferred logits": f"{FULL} {DEFERRED}",
    "full, deferred logits, optimizer on the host": f"{FULL} {DEFERRED} --optimizer-cpu-offload",
    "FSDP2, full, deferred logits": f"--train-backend fsdp --recompute-granularity full {DEFERRED}",
}
BUDGETS = {"0.6B": 24.0, "4B": 74.0, "tiny": 1.0}
"""GiB. Small ones of the small shape keep sequences short, and several cases fit side by side."""


def main() -> None:
    parser = make_parser(__doc__, "gpu_longest")
    parser.add_argument("--shape", choices=["0.6B", "4B"], default="0.6B")
    parser.add_argument("--budget", type=float, help="GiB of allocated memory (default: 24 for 0.6B, 74 for 4B)")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parse_options(parser)
    if options.tiny:
        options.shape = "tiny"
    options.budget = options.budget or BUDGETS[options.shape]
    if options.rank is not None:
        print(json.dumps(longest(options.cases[0], options)))
        sys.stdout.flush()
        os._exit(0)  # the communicators need no farewell
    options.benchmark = f"gpu_longest-{options.shape}"
    at_once = 1 if options.tiny else max(1, int(0.95 * gpu_gib() / (options.budget + 2)))
    with ThreadPoolExecutor(at_once) as threads:
        rows = list(threads.map(lambda name: row_of(name, options), options.cases))
    sys.exit(report(rows, options))


def row_of(name: str, options: Namespace) -> Row:
    """Run a case in a process of its own; its row."""
    what, shape, target = labels(name, options)
    log = options.output / "longest" / f"{options.shape}-{name.replace(', ', '-').replace(' ', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        write_config(Path(work), options.shape)
        which = ["--tiny"] if options.tiny else ["--shape", options.shape]
        command = [sys.executable, __file__, *which, "--budget", str(options.budget), "--cases", name, "--rank", work]
        with log.open("w") as errors:
            try:
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=options.timeout, cwd=ROOT
                )
            except subprocess.TimeoutExpired:
                return not_measured(what, shape, target, f"its time was over (log {log})")
    if done.returncode:
        last = [line.strip() for line in log.read_text().splitlines() if line.strip()][-1:]
        return not_measured(what, shape, target, " ".join(last)[-300:])
    row = judge(name, options, **json.loads(done.stdout.splitlines()[-1]))
    print(line_of(row), flush=True)
    return row


def labels(name: str, options: Namespace) -> tuple[str, str, str]:
    """Name the figure, its shape and its target for the table."""
    return f"longest sequence: {name}", f"{options.shape}, {options.budget:g} GiB", f"within {TARGET:.0%}"


def judge(name: str, options: Namespace, *, planned: int, tried: list[tuple[int, float]]) -> Row:
    """The row of a case: the length at the budget between (or beyond) the two lengths that came closest to it."""
    what, shape, target = labels(name, options)
    found = at_budget(tried, options.budget)
    note = ", ".join(f"{length:,} tokens {gib:.2f} GiB" for length, gib in tried)
    ratio = planned / found
    figure, limit = f"plan {planned:,} tokens", f"measured {found:,.0f} tokens"
    return Row(what, shape, figure, limit, ratio, target, abs(ratio - 1) <= TARGET, note)


def at_budget(tried: list[tuple[int, float]], budget: float) -> float:
    """The length whose peak is the budget, on the line through the two (length, GiB) closest to it."""
    (one, low), (other, high) = sorted(sorted(tried, key=lambda pair: abs(pair[1] - budget))[:2])
    return one + (budget - low) * (other - one) / (high - low)


# ---- one case


def longest(name: str, options: Namespace) -> dict[str, Any]:
    """The length of the plan, and the lengths that were tried with the GiB that each took."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    step = Namespace(
        rank=0, num_gpus=1, layout=CASES[name], accelerator=options.accelerator, length=2 * PROMPT, prompt=PROMPT,
        tokens=2 * PROMPT, micro_batch_tokens=[2 * PROMPT], meet=f"{port}:{options.rank}",
    )  # fmt: skip
    args = flags(step)
    planned = planned_length(args, options.budget * 2**30)
    trainer = start_trainer(args, step, port)
    numbers = iter(range(1000))

    def peak(length: int) -> float:
        step.length = step.tokens = length
        share = make_share(args.replace(max_tokens_per_gpu=length), step, trainer.parallel_config())
        return measured(lambda: one_rollout(trainer, next(numbers), share), options.accelerator) / 2**30

    peak(2 * PROMPT)  # the optimizer makes its state in the first step
    return {"planned": planned, "tried": list(tries(peak, planned, options.budget))}


def tries(peak: Callable[[int], float], first: int, budget: float) -> Iterator[tuple[int, float]]:
    """Lengths and their GiB, each nearer to the budget; at least two."""
    tried: list[tuple[int, float]] = []
    for length in (max(2 * PROMPT, first // 2 // STEP * STEP), first):
        tried.append((length, peak(length)))
        yield tried[-1]
    for _ in range(TRIES):
        if abs(tried[-1][1] - budget) <= CLOSE * budget:
            return
        length = max(2 * PROMPT, round(at_budget(tried, budget)) // STEP * STEP)
        if length in (known for known, _ in tried):
            return
        tried.append((length, peak(length)))
        yield tried[-1]


def planned_length(args: Any, num_bytes: float) -> int:
    """The longest sequence of which the plan says that its training takes at most so many bytes."""
    low, high = 2 * PROMPT, 2 * PROMPT
    while planned_bytes(args, high) <= num_bytes and high < 2**22:
        low, high = high, 2 * high
    while high - low > STEP:
        middle = (low + high) // 2
        low, high = (middle, high) if planned_bytes(args, middle) <= num_bytes else (low, middle)
    return low // STEP * STEP


def planned_bytes(args: Any, length: int) -> int:
    """The plan's peak of a trainer's GPU, in a rollout of one sequence."""
    from slime.plan import Facts, make_plan
    from slime.plan.layout import DataFacts

    changed = args.replace(max_tokens_per_gpu=length, rollout_max_response_len=length - PROMPT, global_batch_size=1)
    memory = make_plan(changed, Facts(data=DataFacts(1, 1, PROMPT, PROMPT))).trainer_memory
    assert memory is not None
    return max(memory.peak.train_peak, memory.peak.log_probs_peak)


def measured(run: Callable[[], Any], accelerator: str) -> int:
    """The most bytes of tensors that are live while this runs."""
    import torch

    gc.collect()
    if accelerator == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run()
        return int(torch.cuda.max_memory_allocated())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in gc.get_objects() if is_tensor(t)}
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=False
    ) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = (e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return sum(storages.values()) + max(accumulate(changes), default=0)


def is_tensor(thing: Any) -> bool:
    """Say whether an object is a tensor that owns its memory."""
    import torch

    return type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu"


if __name__ == "__main__":
    main()
