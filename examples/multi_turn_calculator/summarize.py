"""Say what a finished run of the calculator example measured: tool calls and right answers, step by step.

    python examples/multi_turn_calculator/summarize.py --grpo outputs/multi-turn-calculator/grpo

It reads metrics.jsonl and nothing else.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ACCURACY = "eval/products"
CALLED = "multi_turn/tool_call_rate"


def read_records(metrics_path: Path) -> list[dict[str, Any]]:
    """Every record of a run, in order."""
    return [json.loads(line) for line in metrics_path.read_text().splitlines()]


def main() -> None:
    """Print the evaluations, and the rollouts' tool calls and rewards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grpo", type=Path, required=True, help="output directory of the GRPO run")
    records = read_records(parser.parse_args().grpo / "metrics.jsonl")
    rewards = {r["rollout/step"]: r["rollout/raw_reward"] for r in records if "rollout/raw_reward" in r}
    for record in (r for r in records if CALLED in r):
        step = record["rollout/step"]
        print(
            f"rollout {step:3.0f}: tool called in {record[CALLED]:6.1%} of the samples, "
            f"right answers {rewards.get(step, float('nan')):6.1%}, "
            f"template drift {record.get('multi_turn/template_drift', 0):g} tokens"
        )
    evaluations = [r for r in records if ACCURACY in r]
    for record in evaluations:
        print(
            f"held-out problems at step {record['eval/step']:3.0f}: {record[ACCURACY]:6.1%} right, "
            f"tool called in {record[ACCURACY + '/' + CALLED]:6.1%}"
        )
    first, last = evaluations[0][ACCURACY], evaluations[-1][ACCURACY]
    print(f"GRPO alone: {first:.1%} -> {last:.1%} ({100 * (last - first):+.1f} points)")


if __name__ == "__main__":
    main()
