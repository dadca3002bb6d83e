"""Say what a finished quick start measured, and give the SFT run the evaluation of its model.

    python examples/tiny_cpu/summarize.py --sft outputs/tiny-cpu/sft --grpo outputs/tiny-cpu/grpo

The SFT run starts no engine, so its model is evaluated when the GRPO run begins; that record is added to the SFT run's
metrics.jsonl (with "evaluated_by") unless it has one. It reads metrics.jsonl and nothing else.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

METRIC = "eval/addition"


def eval_records(metrics_path: Path) -> list[dict[str, Any]]:
    """The evaluation records of a run, in order."""
    records = [json.loads(line) for line in metrics_path.read_text().splitlines()]
    return [record for record in records if METRIC in record]


def last_train_step(metrics_path: Path) -> int:
    """The step of the last train record, 0 when there is none."""
    records = (json.loads(line) for line in metrics_path.read_text().splitlines())
    return max((int(record["train/step"]) for record in records if record["step_key"] == "train/step"), default=0)


def give_sft_its_evaluation(sft_metrics: Path, grpo_metrics: Path) -> None:
    """Append the GRPO run's evaluation before training to the SFT run's metrics, once."""
    if eval_records(sft_metrics):
        return
    record = dict(eval_records(grpo_metrics)[0])
    record["eval/step"] = last_train_step(sft_metrics)
    record["evaluated_by"] = str(grpo_metrics)
    with sft_metrics.open("a") as file:
        file.write(json.dumps(record) + "\n")


def main() -> None:
    """Print the evaluations of the GRPO run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft", type=Path, required=True, help="output directory of the SFT run")
    parser.add_argument("--grpo", type=Path, required=True, help="output directory of the GRPO run")
    args = parser.parse_args()
    grpo_metrics = args.grpo / "metrics.jsonl"
    give_sft_its_evaluation(args.sft / "metrics.jsonl", grpo_metrics)
    records = eval_records(grpo_metrics)
    first, last = records[0][METRIC], records[-1][METRIC]
    for record in records:
        print(f"held-out accuracy at step {record['eval/step']:4.0f}: {record[METRIC]:6.1%}")
    print(
        f"GRPO alone: {first:.1%} -> {last:.1%} ({100 * (last - first):+.1f} points); curves: {args.grpo}/curves.png"
    )


if __name__ == "__main__":
    main()
