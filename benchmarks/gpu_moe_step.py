"""A train step of a model with experts: one expert after the other, and all in one product (--moe-grouped-gemm).

    python benchmarks/gpu_moe_step.py                       # Qwen3-30B-A3B with 4 of its 48 layers, one GPU
    python benchmarks/gpu_moe_step.py --num-gpus 4 --layout "--expert-model-parallel-size 4"

Each runs in processes of its own, as benchmarks/gpu_train_step.py does, whose other options it takes; the last line is
the ratio of the two times. It prints what they print and measures nothing by itself.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

GROUPED = "--moe-grouped-gemm"
STEP = Path(__file__).with_name("gpu_train_step.py")
LINE = re.compile(r"^  (log-probs|train|whole) +([\d.]+) ms", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="30B-A3B")
    parser.add_argument("--layout", default="", help="more flags of train.py for both")
    options, rest = parser.parse_known_args()
    sequential, grouped = (
        step([*rest, "--shape", options.shape, f"--layout={options.layout} {flag}"]) for flag in ("", GROUPED)
    )
    ratios = ", ".join(f"{part} {sequential[part] / grouped[part]:.2f} x" for part in sequential)
    print(f"{GROUPED} is faster by: {ratios}")


def step(options: list[str]) -> dict[str, float]:
    """Milliseconds of each part of a step, after printing the report."""
    report = subprocess.run([sys.executable, STEP, *options], stdout=subprocess.PIPE, text=True, check=True).stdout
    print(report, end="", flush=True)
    return {part: float(milliseconds) for part, milliseconds in LINE.findall(report)}


if __name__ == "__main__":
    main()
