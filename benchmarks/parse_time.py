"""Seconds until a command line is parsed and checked, in a fresh process, without and with cached option tables.

    python benchmarks/parse_time.py [--rounds 5] [--output results.json]

The command line is the GRPO line of scripts/run-tiny-cpu.sh, with model and data that exist. The time is that of
`from slime.config.parse import parse_args; parse_args(argv=...)`; `CPU` is what the process and its children
compute for it, which other work on the machine changes less; `process` adds Python's own start and end.

    cold   SLIME_CACHE_DIR is empty: SGLang, its router and megatron-core are imported once, to ask for their options
    warm   the median of the rounds that follow

It ends with status 1 when a budget is exceeded: 15 s cold, 3 s warm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUDGET = {"cold": 15.0, "warm": 3.0}
HEAVY = ("torch", "transformers", "megatron", "sglang", "sglang_router", "ray", "pyarrow", "aiohttp")
PROGRAM = f"""
import json, os, sys, time
start, cpu = time.perf_counter(), sum(os.times()[:4])
from slime.config.parse import parse_args
parse_args(argv=sys.argv[1:])
seconds = time.perf_counter() - start
cpu = sum(os.times()[:4]) - cpu
print(json.dumps({{"seconds": seconds, "cpu": cpu, "imported": [name for name in {HEAVY!r} if name in sys.modules]}}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="warm processes")
    parser.add_argument("--output", type=Path, default=None, help="also write the result as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        report = measure(Path(work), options.rounds)
    if options.output:
        options.output.write_text(json.dumps(report, indent=1))
    for name, seconds in BUDGET.items():
        if report[name] > seconds:
            sys.exit(f"error: {name} {report[name]:.2f} s is above the budget of {seconds:.0f} s")


def measure(work: Path, rounds: int) -> dict[str, float]:
    """Make the inputs, parse cold once and warm `rounds` times; print the table and return seconds by name."""
    make_inputs(work)
    line = training_line(work)
    print(f"$ python benchmarks/parse_time.py    # {len(line)} tokens: {' '.join(line[:6])} ...", flush=True)
    cold = parse_once(work, line)
    warm = [parse_once(work, line) for _ in range(rounds)]
    report: dict[str, float] = {}
    for name, runs in (("cold", [cold]), ("warm", warm)):
        seconds, cpu, process = (statistics.median(run[key] for run in runs) for key in ("seconds", "cpu", "process"))
        report |= {name: seconds, f"{name}_cpu": cpu, f"{name}_process": process}
        print(f"{name} {seconds:6.2f} s   budget {BUDGET[name]:4.0f} s   CPU {cpu:6.2f} s   process {process:6.2f} s")
    print(f"heavy packages that a warm parse imports: {', '.join(warm[0]['imported']) or 'none'}")
    return report


def make_inputs(work: Path) -> None:
    """The tiny model and its data, as scripts/run-tiny-cpu.sh makes them."""
    for command in (
        ["tools/make_tiny_model.py", "--output", str(work / "model")],
        ["examples/tiny_cpu/make_data.py", "--output", str(work / "data"), "--num-demonstrations", "64"],
    ):
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)


def training_line(work: Path) -> list[str]:
    """The GRPO line of scripts/run-tiny-cpu.sh."""
    flags = f"""
        --accelerator cpu --colocate --seed 0 --rollout-seed 0
        --hf-checkpoint {work}/model --model-args-from-hf --ref-load {work}/model
        --prompt-data {work}/data/train.jsonl --input-key prompt --label-key label --apply-chat-template
        --rollout-shuffle --custom-rm-path examples.tiny_cpu.reward:exact_match --advantage-estimator grpo
        --num-rollout 70 --rollout-batch-size 64 --n-samples-per-prompt 8 --global-batch-size 512
        --rollout-max-response-len 5 --rollout-temperature 1 --sglang-enable-deterministic-inference
        --use-dynamic-batch-size --max-tokens-per-gpu 8192
        --lr 2e-4 --lr-decay-style constant --weight-decay 0
        --eval-config {work}/data/eval.yaml --eval-interval 35
        --save {work}/grpo --save-interval 70 --no-save-optim --save-hf {work}/grpo/hf
    """
    return flags.split()


def parse_once(work: Path, line: list[str]) -> dict[str, Any]:
    """Seconds of one parse, of its CPU time and of its whole process, and the heavy packages that it imported."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SLIME_CACHE_DIR": str(work / "cache")}
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", PROGRAM, *line], cwd=ROOT, env=environment, capture_output=True)
    process = time.perf_counter() - start
    if done.returncode != 0:
        sys.exit(f"error: the command line was refused:\n{done.stderr.decode()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]) | {"process": process}


if __name__ == "__main__":
    main()
