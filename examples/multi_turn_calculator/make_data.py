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

from examples.multi_turn_calculator.tool import SCHEMA, evaluate, show
from examples.tiny import data_parser, write_and_say, write_eval_config, write_jsonl

Problem = tuple[int, int]
Message = dict[str, str]
HELD_OUT_SEED = 20260801  # fixed: every seed of a run is evaluated on the same problems
# Pieces of a call that the tiny tokenizer has as one token each, about as a large tokenizer does.
PIECES = ["<tool_call>", "</tool_call>", '{"name": "', "calculator", '", "arguments": {"expression": "', '"}}']
NUM_EVAL = 128
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


def demonstration(problem: Problem, *, rng: random.Random) -> list[Message]:
    """A conversation: a good call, or else a call with a wrong digit, or a guess without a call."""
    a, b = problem
    kind = rng.choice(["good", "good", "wrong call", "guess"])
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


def write_data(args: argparse.Namespace) -> dict[str, int]:
    """Write all files; returns rows per JSONL file."""
    output, (training, held_out) = args.output, split_problems(NUM_EVAL)
    rng = random.Random(args.seed)
    chosen = (rng.choice(training) for _ in range(args.num_demonstrations))
    shown = ({"messages": demonstration(p, rng=rng)} for p in chosen)
    counts = {"sft.jsonl": write_jsonl(output / "sft.jsonl", shown)}
    for name, problems in (("train.jsonl", training), ("eval.jsonl", held_out)):
        rows = ({"prompt": [question(p)], "label": str(p[0] * p[1]), "tools": [SCHEMA]} for p in problems)
        counts[name] = write_jsonl(output / name, rows)
    dataset = {"name": "products", "path": str(output / "eval.jsonl"), "input_key": "prompt", "label_key": "label"}
    dataset["custom_rm_path"] = GRADER
    write_eval_config(output / "eval.yaml", dataset, samples=args.eval_samples, max_response_len=MAX_RESPONSE_TOKENS)
    (output / "tools.yaml").write_text(f"tool_function_path: {TOOL}\ntool_timeout_s: 5\n")
    return counts


if __name__ == "__main__":
    write_and_say(write_data, data_parser(__doc__))
