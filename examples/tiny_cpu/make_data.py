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
from pathlib import Path

from examples.tiny import data_parser, write_and_say, write_jsonl

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
    output, rng = args.output, random.Random(args.seed)
    training, held_out = split_problems(args.num_eval)
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
    parser = data_parser(__doc__, demonstrations=256 * 400)
    parser.set_defaults(eval_samples=4)
    parser.add_argument("--num-eval", type=int, default=250, help="held-out problems")
    parser.add_argument("--wrong-share", type=float, default=0.5, help="share of demonstrations with a wrong answer")
    return parser


if __name__ == "__main__":
    write_and_say(write_data, build_parser())
