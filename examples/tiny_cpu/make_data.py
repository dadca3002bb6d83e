"""Write the data of the quick start: two-digit addition.

    python examples/tiny_cpu/make_data.py --output outputs/tiny-cpu/data

Files: train.jsonl (prompts and labels), eval.jsonl (held-out problems), sft.jsonl (demonstrations, part of them wrong,
so that reinforcement learning has something to correct), eval.yaml (the evaluation set with a grader of its own, so it
is graded the same whatever the training reward is). The seed decides all but which problems are held out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path

Problem = tuple[int, int]
# Three digits and the end of the turn, and one more: an engine calls a response that fills its limit truncated.
MAX_RESPONSE_TOKENS = 5
HELD_OUT_SEED = 20260801  # fixed: every seed of a run is evaluated on the same problems
SLIPS = (-10, -1, 1, 10)
GRADER = "examples.tiny_cpu.reward:exact_match"


def prompt(problem: Problem) -> list[dict[str, str]]:
    """The message list of a problem; always six characters, so that every prompt has the same number of tokens."""
    return [{"role": "user", "content": f"{problem[0]:02d}+{problem[1]:02d}="}]


def split_problems(num_eval: int) -> tuple[list[Problem], list[Problem]]:
    """All 10,000 problems as (training, held out); no problem is in both."""
    problems = list(itertools.product(range(100), range(100)))
    random.Random(HELD_OUT_SEED).shuffle(problems)
    held_out, training = problems[:num_eval], problems[num_eval:]
    assert not set(held_out) & set(training), "a held-out problem is also a training problem"
    assert len(held_out) == num_eval, f"asked for {num_eval} held-out problems of 10,000"
    return training, held_out


def demonstration(problem: Problem, *, wrong_share: float, rng: random.Random) -> list[dict[str, str]]:
    """A conversation that answers the problem, with a slip of one in a digit for a share of them."""
    answer = sum(problem)
    if rng.random() < wrong_share:
        answer = max(0, answer + rng.choice(SLIPS))
    return [*prompt(problem), {"role": "assistant", "content": str(answer)}]


def write_jsonl(path: Path, rows: Iterable[dict[str, object]]) -> int:
    """One JSON object a line; returns how many."""
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))
    return len(lines)


def eval_config(eval_path: Path, samples_per_problem: int) -> str:
    """The evaluation file: temperature 1, several samples a problem, graded by exact match."""
    return f"""eval:
  defaults:
    temperature: 1.0
    top_p: 1.0
    n_samples_per_eval_prompt: {samples_per_problem}
    max_response_len: {MAX_RESPONSE_TOKENS}
  datasets:
    - name: addition
      path: {json.dumps(str(eval_path))}
      input_key: prompt
      label_key: label
      apply_chat_template: true
      custom_rm_path: {GRADER}
"""


def write_data(args: argparse.Namespace) -> dict[str, int]:
    """Write all four files; returns rows per JSONL file."""
    output: Path = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    training, held_out = split_problems(args.num_eval)
    rng = random.Random(args.seed)
    chosen = (rng.choice(training) for _ in range(args.num_demonstrations))
    counts = {
        "train.jsonl": write_jsonl(
            output / "train.jsonl", ({"prompt": prompt(p), "label": str(sum(p))} for p in training)
        ),
        "eval.jsonl": write_jsonl(
            output / "eval.jsonl", ({"prompt": prompt(p), "label": str(sum(p))} for p in held_out)
        ),
        "sft.jsonl": write_jsonl(
            output / "sft.jsonl",
            ({"messages": demonstration(p, wrong_share=args.wrong_share, rng=rng)} for p in chosen),
        ),
    }
    (output / "eval.yaml").write_text(eval_config(output / "eval.jsonl", args.eval_samples))
    return counts


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the demonstrations")
    parser.add_argument("--num-eval", type=int, default=250, help="held-out problems")
    parser.add_argument("--eval-samples", type=int, default=4, help="samples per held-out problem")
    parser.add_argument("--num-demonstrations", type=int, default=256 * 400)
    parser.add_argument("--wrong-share", type=float, default=0.5, help="share of demonstrations with a wrong answer")
    return parser


def main() -> None:
    """Write the data and say what is in it."""
    args = build_parser().parse_args()
    for name, count in write_data(args).items():
        print(f"{args.output / name}: {count} rows")


if __name__ == "__main__":
    main()
