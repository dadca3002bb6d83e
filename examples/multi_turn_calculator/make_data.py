"""Write the data of the calculator example: products of two-digit numbers, which a tiny model cannot do in its head.

    python examples/multi_turn_calculator/make_data.py --output outputs/multi-turn-calculator/data

Files: train.jsonl (prompts, labels and the tool's schema), eval.jsonl (held-out problems), sft.jsonl (demonstrations:
half call the calculator with the right expression, a quarter with a wrong one, a quarter guess without it), eval.yaml
(the evaluation set) and tools.yaml (what --custom-config-path needs). The seed decides all but what is held out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path

from examples.multi_turn_calculator.tool import SCHEMA, evaluate, show

Problem = tuple[int, int]
Message = dict[str, str]
HELD_OUT_SEED = 20260801  # fixed: every seed of a run is evaluated on the same problems
# Pieces of a call that the tiny tokenizer has as one token each, about as a large tokenizer does.
CALL_PIECES = ["<tool_call>", "</tool_call>", '{"name": "', "calculator", '", "arguments": {"expression": "', '"}}']
MAX_RESPONSE_TOKENS = 48  # a call (14 tokens), the tool's turn (13), an answer (5), and something to spare
GRADER = "examples.multi_turn_calculator.reward:right_answer"
TOOL = "examples.multi_turn_calculator.tool:calculator"


def question(problem: Problem) -> Message:
    """What the user asks; always six characters."""
    return {"role": "user", "content": f"{problem[0]}*{problem[1]}="}


def call_text(expression: str) -> str:
    """A tool call as the model shall write it."""
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<tool_call>{call}</tool_call>"


def split_problems(num_eval: int) -> tuple[list[Problem], list[Problem]]:
    """All 8,100 products as (training, held out); no problem is in both."""
    problems = list(itertools.product(range(10, 100), range(10, 100)))
    random.Random(HELD_OUT_SEED).shuffle(problems)
    return problems[num_eval:], problems[:num_eval]


def demonstration(problem: Problem, *, good_share: float, rng: random.Random) -> list[Message]:
    """A conversation: a good call, or else a call with a wrong digit, or a guess without a call."""
    a, b = problem
    kind = "good" if rng.random() < good_share else rng.choice(["wrong call", "guess"])
    if kind == "guess":
        return [question(problem), {"role": "assistant", "content": str(rng.randrange(100, 9802))}]
    if kind == "wrong call":
        a, b = rng.choice([(other_digit(a, rng), b), (a, other_digit(b, rng))])
    expression = f"{a}*{b}"
    result = show(evaluate(expression))
    return [
        question(problem),
        {"role": "assistant", "content": call_text(expression)},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]


def other_digit(number: int, rng: random.Random) -> int:
    """The number with another last digit."""
    return number - number % 10 + (number % 10 + rng.randrange(1, 10)) % 10


def write_jsonl(path: Path, rows: Iterable[dict[str, object]]) -> int:
    """One JSON object a line; returns how many."""
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))
    return len(lines)


def eval_config(eval_path: Path, samples_per_problem: int) -> str:
    """The evaluation file: temperature 1, several samples a problem, graded by the final answer."""
    return f"""eval:
  defaults:
    temperature: 1.0
    top_p: 1.0
    n_samples_per_eval_prompt: {samples_per_problem}
    max_response_len: {MAX_RESPONSE_TOKENS}
  datasets:
    - name: products
      path: {json.dumps(str(eval_path))}
      input_key: prompt
      label_key: label
      custom_rm_path: {GRADER}
"""


def write_data(args: argparse.Namespace) -> dict[str, int]:
    """Write all files; returns rows per JSONL file."""
    output: Path = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    training, held_out = split_problems(args.num_eval)
    rng = random.Random(args.seed)
    chosen = (rng.choice(training) for _ in range(args.num_demonstrations))
    shown = ({"messages": demonstration(p, good_share=args.good_share, rng=rng)} for p in chosen)
    counts = {"sft.jsonl": write_jsonl(output / "sft.jsonl", shown)}
    for name, problems in (("train.jsonl", training), ("eval.jsonl", held_out)):
        rows = ({"prompt": [question(p)], "label": str(p[0] * p[1]), "tools": [SCHEMA]} for p in problems)
        counts[name] = write_jsonl(output / name, rows)
    (output / "eval.yaml").write_text(eval_config(output / "eval.jsonl", args.eval_samples))
    (output / "tools.yaml").write_text(f"tool_function_path: {TOOL}\ntool_timeout_s: 5\n")
    return counts


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the demonstrations")
    parser.add_argument("--num-eval", type=int, default=128, help="held-out problems")
    parser.add_argument("--eval-samples", type=int, default=2, help="samples per held-out problem")
    parser.add_argument("--num-demonstrations", type=int, default=128 * 200)
    parser.add_argument("--good-share", type=float, default=0.5, help="share of demonstrations that call rightly")
    return parser


def main() -> None:
    """Write the data and say what is in it."""
    args = build_parser().parse_args()
    for name, count in write_data(args).items():
        print(f"{args.output / name}: {count} rows")


if __name__ == "__main__":
    main()
