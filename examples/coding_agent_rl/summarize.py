"""Say what a finished run of the coding agent example measured: fixed repositories, rollout by rollout.

    python examples/coding_agent_rl/summarize.py --grpo outputs/coding-agent/grpo

It reads metrics.jsonl and nothing else.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

FIXED = "eval/bugs"


def main() -> None:
    """Print the evaluations, and the rewards and breaks of the rollouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grpo", type=Path, required=True, help="output directory of the GRPO run")
    lines = (parser.parse_args().grpo / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    rollouts: dict[float, dict[str, float]] = {}
    for record in (r for r in records if "rollout/step" in r):
        rollouts.setdefault(record["rollout/step"], {}).update(record)
    for step, record in rollouts.items():
        counts = {name: record.get(f"agent/{name}", 0) for name in ("turns", "breaks", "forks")}
        said = ", ".join(f"{name} {value:g}" for name, value in counts.items())
        print(f"rollout {step:3.0f}: {record['rollout/raw_reward']:6.1%} fixed; {said}")
    evaluations = [record for record in records if FIXED in record]
    for record in evaluations:
        print(f"held-out repositories at step {record['eval/step']:3.0f}: {record[FIXED]:6.1%} fixed")
    first, last = evaluations[0][FIXED], evaluations[-1][FIXED]
    print(f"GRPO alone: {first:.1%} -> {last:.1%} ({100 * (last - first):+.1f} points)")


if __name__ == "__main__":
    main()
