"""Draw the curves of the symptoms that run-troubleshooting-cpu.sh has reproduced: one picture each.

python examples/troubleshooting/plot.py --runs outputs/troubleshooting --output docs/images/troubleshooting
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

# Symptom -> metrics that prove it.
EVIDENCE = {
    "flat": ("rollout/raw_reward", "rollout/zero_std/fraction", "train/grad_norm"),
    "collapse": ("rollout/raw_reward", "train/grad_norm", "train/entropy_loss"),
    "entropy": ("train/entropy_loss", "rollout/raw_reward", "rollout/zero_std/fraction"),
    "lengths": ("rollout/response_len/mean", "rollout/truncated_ratio", "rollout/raw_reward"),
    "gap": ("train/train_rollout_logprob_abs_diff", "rollout/weight_staleness/mean", "rollout/raw_reward"),
    "slow": ("perf/rollout_time",),
}


def curve(run: Path, metric: str) -> list[float]:
    """Return the values of a metric in the order of metrics.jsonl; empty where the run or the metric is missing."""
    path = run / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [record[metric] for record in records if metric in record]


def draw(runs: Path, symptom: str, output: Path) -> None:
    """Draw the metrics that prove a symptom, with those of the healthy run, into OUTPUT/SYMPTOM.png."""
    metrics = EVIDENCE[symptom]
    figure, axes = pyplot.subplots(1, len(metrics), figsize=(3.2 * len(metrics), 2.4), squeeze=False)
    for axis, metric in zip(axes[0], metrics, strict=True):
        axis.plot(curve(runs / symptom, metric), color="#c0392b", label="with the fault")
        axis.plot(curve(runs / "healthy", metric), color="#2471a3", linestyle="--", label="healthy")
        axis.set_title(metric, fontsize=8)
        axis.set_xlabel("rollout", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(output / f"{symptom}.png", dpi=90)
    pyplot.close(figure)


def main() -> None:
    """Draw what is there, and say which files were written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="OUTPUT of run-troubleshooting-cpu.sh")
    parser.add_argument("--output", type=Path, required=True, help="directory of the pictures")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for symptom in EVIDENCE:
        if (options.runs / symptom / "metrics.jsonl").exists():
            draw(options.runs, symptom, options.output)
            print(options.output / f"{symptom}.png")


if __name__ == "__main__":
    main()
