"""What a run with MIS logged, as a table: accuracy, and how far engine and trainer were apart.

    python examples/train_infer_mismatch_helper/summarize.py OUTPUT_DIR

It reads OUTPUT_DIR/metrics.jsonl and knows only the names of the metrics.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime.observability.console import read_series  # noqa: E402

METRICS = (
    "eval/addition",
    "train/train_rollout_logprob_abs_diff",
    "train/mis_ratio",
    "train/mis_k3_kl",
    "train/mis_weight",
    "train/mis_clipfrac",
    "train/mis_rejected",
    "train/mis_vetoed",
    "train/mis_batch_mean",
)


def table(metrics_file: Path) -> list[str]:
    """Lines of a Markdown table: first, last, smallest and largest value of each metric that was logged."""
    series = read_series(metrics_file)
    lines = ["| metric | first | last | min | max |", "|---|---|---|---|---|"]
    for name in METRICS:
        values = [value for _, value in sorted(series.get(name, {}).items())]
        if values:
            shown = (values[0], values[-1], min(values), max(values))
            lines.append(f"| {name} | " + " | ".join(f"{value:.4g}" for value in shown) + " |")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path)
    print("\n".join(table(parser.parse_args().output_dir / "metrics.jsonl")))
