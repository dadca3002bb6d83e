"""Helpers of the tiny runs of all examples: data files, a control that must not learn, and the curve of a run.

    python -m examples.tiny outputs/retool/grpo

A run that gains is to gain from its reward. Rewards of other samples must teach it nothing:

    GRPO_FLAGS="--custom-reward-post-process-path examples.tiny.permuted" bash examples/retool/run-tiny.sh
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def write_jsonl(path: Path, rows: Iterable[Any]) -> int:
    """Write one JSON object a line; return how many."""
    lines = [json.dumps(row) + "\n" for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    return len(lines)


def write_eval_config(path: Path, dataset: dict[str, Any], *, samples: int, max_response_len: int) -> None:
    """Write the evaluation file: one set, temperature 1.

    Args:
        dataset: its name, path, input_key and so on.
        samples: of a prompt.
    """
    defaults = {"temperature": 1.0, "top_p": 1.0, "max_response_len": max_response_len}
    defaults["n_samples_per_eval_prompt"] = samples
    # JSON is YAML
    path.write_text(json.dumps({"eval": {"defaults": defaults, "datasets": [dataset]}}, indent=2) + "\n")


def data_parser(doc: str | None, *, demonstrations: int = 128 * 250) -> argparse.ArgumentParser:
    """Return the command line of a make_data.py, to which it may add."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=lambda text: Path(text).resolve(), required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the demonstrations")
    parser.add_argument("--eval-samples", type=int, default=2, help="samples per held-out problem")
    parser.add_argument("--num-demonstrations", type=int, default=demonstrations, help="rows of sft.jsonl")
    return parser


def write_and_say(write_data: Callable[[argparse.Namespace], dict[str, int]], parser: argparse.ArgumentParser) -> None:
    """Write an example's data, and print how many rows each file has."""
    args = parser.parse_args()
    for name, count in write_data(args).items():
        print(f"{args.output / name}: {count} rows")


def permuted(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """Return the rewards, and those of other samples of the batch, normalised by group as GRPO does."""
    from slime.rollout.train_data import normalize_by_group, raw_reward

    raw = [raw_reward(args, sample) for sample in samples]
    return raw, normalize_by_group(samples, random.sample(raw, len(raw)), divide_by_std=True)


def print_curve(run: Path) -> None:
    """Print the evaluations of a run, its rewards in training, and how far engine and trainer were apart."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    values = [item for line in lines for item in json.loads(line).items()]

    def column(name: str) -> list[float]:
        return [value for key, value in values if key == name]

    for name in dict.fromkeys(key for key, _ in values if re.fullmatch(r"eval/\w+", key) and key != "eval/step"):
        held_out = column(name)
        curve = " -> ".join(f"{value:.1%}" for value in held_out)
        print(f"{name}: {curve} ({100 * (held_out[-1] - held_out[0]):+.1f} points)")
    print("reward in training:", ", ".join(f"{value:.2f}" for value in column("rollout/raw_reward")))
    if apart := column("train/train_rollout_logprob_abs_diff"):
        print(f"log-probs of engine and trainer differ by {min(apart):.1e} to {max(apart):.1e} (means of steps)")


def main() -> None:
    """Read the command line and print the curve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output directory of a run, with its metrics.jsonl")
    print_curve(parser.parse_args().run)


if __name__ == "__main__":
    main()
