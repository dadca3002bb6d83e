"""The scaling table of the trainer: tokens per second, MFU and memory for layouts of 1, 2 and 4 GPUs.

    python benchmarks/gpu_scaling.py --num-gpus 4 [--shape 4B] [--shape 30B-A3B] [--seconds 540]
    python benchmarks/gpu_scaling.py --tiny                       # two processes on the CPU, to try the script

Weak scaling: each GPU has 16,384 tokens of a step, whatever the layout. Every case is one run of gpu_train_step.py,
whose report is kept in `--out`; a case that has one is not repeated, so a call that was cut off, or ended by
`--seconds`, goes on where it stopped. The table at the end has all cases with a report. Efficiency is the tokens per
second and GPU, over those of one GPU for the same shape.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

STEP = Path(__file__).with_name("gpu_train_step.py")
TP = "--sequence-parallel --tensor-model-parallel-size"
PP, CP = "--pipeline-model-parallel-size", "--context-parallel-size"
EP, ETP = "--moe-grouped-gemm --expert-model-parallel-size", "--expert-tensor-parallel-size"
LINE = re.compile(r"^  (train|log-probs) +([\d.]+) ms +([\d.]+) tok/s a GPU +\S+ TFLOP/s a GPU +MFU +(\S+)%", re.M)
MEMORY = re.compile(r"peak memory ([\d.]+) GiB")
TOKENS = 16384


@dataclass(frozen=True)
class Case:
    """One row: the model, its layout, and how many GPUs one copy of the model takes."""

    shape: str
    gpus: int
    name: str
    layout: str = ""
    copy: int = 1
    micro_batch: int = TOKENS

    @property
    def key(self) -> str:
        """The name of its report."""
        return f"{self.shape}-{self.gpus}-{self.name}".replace(" ", "_")


def dense_cases(shape: str) -> list[Case]:
    """Of a dense model; a pipeline has 4 micro-batches for each of its stages."""
    cases = [Case(shape, 1, "1")]
    for n in (2, 4):
        cases += [
            Case(shape, n, f"DP {n}"),
            Case(shape, n, f"TP {n}", f"{TP} {n}", n),
            Case(shape, n, f"CP {n}", f"{CP} {n}", n, TOKENS // n),
            Case(shape, n, f"PP {n}", f"{PP} {n}", n, TOKENS // 4),
        ]
    return [*cases, Case(shape, 4, "TP 2 DP 2", f"{TP} 2", 2)]


def moe_cases(shape: str) -> list[Case]:
    """Of a model with experts, in grouped products."""
    return [
        Case(shape, 1, "1", "--moe-grouped-gemm"),
        Case(shape, 2, "DP 2 EP 2", f"{EP} 2"),
        Case(shape, 4, "DP 4 EP 1", "--moe-grouped-gemm"),
        Case(shape, 4, "DP 4 EP 4", f"{EP} 4"),
        Case(shape, 4, "TP 2 DP 2 EP 4", f"{TP} 2 {EP} 4 {ETP} 1", 2),
        Case(shape, 4, "PP 2 DP 2 EP 2", f"{PP} 2 {EP} 2", 2, TOKENS // 4),
        Case(shape, 4, "CP 2 DP 2 EP 4", f"{CP} 2 {EP} 4", 2, TOKENS // 2),
    ]


TINY = [Case("tiny-moe", 1, "1"), Case("tiny-moe", 2, "DP 2 EP 2", "--expert-model-parallel-size 2")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-gpus", type=int, default=4, help="of this machine; larger cases are left out")
    parser.add_argument("--shape", action="append", choices=["0.6B", "4B", "30B-A3B"], help="default: all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after so many")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_scaling"))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    shapes = options.shape or ["0.6B", "4B", "30B-A3B"]
    cases = [case for shape in shapes for case in (moe_cases if shape == "30B-A3B" else dense_cases)(shape)]
    start, failed = time.monotonic(), 0
    for case in TINY if options.tiny else [case for case in cases if case.gpus <= options.num_gpus]:
        if time.monotonic() - start > options.seconds:
            break
        failed += not measure(case, options.out, tiny=options.tiny)
    table(TINY if options.tiny else cases, options.out)
    sys.exit(1 if failed else 0)


def measure(case: Case, out: Path, *, tiny: bool) -> bool:
    """Run a case that has no report yet; whether there is one now."""
    report, log = out / f"{case.key}.txt", out / f"{case.key}.log"
    if report.is_file():
        return True
    size = ["--tokens", "256", "--length", "128", "--steps", "2", "--accelerator", "cpu"]
    if not tiny:
        size = ["--tokens", str(TOKENS * case.copy), "--micro-batch-tokens", str(case.micro_batch)]
    command = [sys.executable, str(STEP), "--shape", case.shape, "--num-gpus", str(case.gpus), *size]
    print(f"{case.key} ...", flush=True)
    with log.open("w") as errors:
        command.append(f"--layout={case.layout}")
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
    if done.returncode:
        print(f"{case.key} failed, see {log}", flush=True)
        return False
    partial = report.with_suffix(".part")
    partial.write_text(done.stdout)
    partial.rename(report)
    return True


def table(cases: list[Case], out: Path) -> None:
    """Print a row for each case that was measured, as RESULTS.md takes them."""
    print("| model | GPUs | layout | train tok/s a GPU | MFU | efficiency | log-probs tok/s a GPU | peak GiB |")
    print("|---|---|---|---|---|---|---|---|")
    alone: dict[str, float] = {}
    for case in cases:
        report = out / f"{case.key}.txt"
        if not report.is_file():
            continue
        text = report.read_text()
        parts = {part: (float(rate), mfu) for part, _, rate, mfu in LINE.findall(text)}
        (rate, mfu), memory = parts["train"], MEMORY.search(text)
        if case.gpus == 1:
            alone[case.shape] = rate
        efficiency = f"{100 * rate / alone[case.shape]:.0f}%" if case.shape in alone else "-"
        peak = memory[1] if memory else "-"
        row = (case.shape, case.gpus, case.name, f"{rate:,.0f}", f"{mfu}%", efficiency)
        print("| " + " | ".join(map(str, (*row, f"{parts['log-probs'][0]:,.0f}", peak))) + " |", flush=True)


if __name__ == "__main__":
    main()
