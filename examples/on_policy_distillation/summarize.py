"""Print what a student learnt from its teacher: held-out accuracy of both, and the divergence before and after.

python examples/on_policy_distillation/summarize.py --run OUTPUT/opd --teacher QUICK_START/grpo
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

METRIC = "eval/addition"
DIVERGENCE = "rollout/opd_reverse_kl"


def values(metrics: Path, name: str) -> list[float]:
    """Every value of a metric, in order."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record[name] for record in records if name in record]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="output directory of the distillation")
    parser.add_argument(
        "--teacher", type=Path, required=True, help="output directory of the run that made the teacher"
    )
    args = parser.parse_args()
    student, (*_, teacher) = values(args.run / "metrics.jsonl", METRIC), values(args.teacher / "metrics.jsonl", METRIC)
    divergence = values(args.run / "metrics.jsonl", DIVERGENCE)
    print(f"held-out accuracy: student {student[0]:.1%} -> {student[-1]:.1%}, teacher {teacher:.1%}")
    print(f"reverse KL per token: {divergence[0]:.4f} -> {divergence[-1]:.4f}")


if __name__ == "__main__":
    main()
