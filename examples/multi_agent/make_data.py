r"""Write the data of the tiny run: numbers to be written backwards, by agents that solve, rewrite and select.

    python examples/multi_agent/make_data.py --output outputs/multi_agent/data

Files: train.jsonl and eval.jsonl (no number is in both), sft.jsonl (demonstrations of the three roles: half are right;
the others copy, guess, or name no solution), eval.yaml, and multi_agent.yaml (for --custom-config-path).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from typing import Any

from examples.tiny import data_parser, write_and_say, write_eval_config, write_jsonl

HELD_OUT_SEED = 20261127  # fixed: every seed of a run is evaluated on the same numbers
NUM_EVAL = 128
TEMPLATES = {"rewriter": "{problem}\n{solutions}\nRewrite.", "selector": "{problem}\n{solutions}\nSelect."}
# Each is one token of the tiny tokenizer, about as words are in a large one.
PIECES = [" backwards?", "\\boxed{", "Judgment: ", "Solution 1:\n", "\n\nSolution 2:\n", "\nRewrite.", "\nSelect."]
MAX_RESPONSE_TOKENS = 8  # an answer has 7


def numbers() -> list[str]:
    """All numbers of four digits that read otherwise backwards, in a fixed order, without a 0."""
    found = ["".join(digits) for digits in itertools.product("123456789", repeat=4) if digits != digits[::-1]]
    random.Random(HELD_OUT_SEED).shuffle(found)
    return found


def question(number: str) -> dict[str, str]:
    """Return the text of the user's message."""
    return {"role": "user", "content": f"{number} backwards?"}


def boxed(text: str) -> str:
    r"""A solution."""
    return f"\\boxed{{{text}}}"


def guess(rng: random.Random) -> str:
    """Any number."""
    return "".join(rng.choices("123456789", k=4))


def demonstration(number: str, rng: random.Random) -> list[dict[str, str]]:
    """One agent's prompt and answer; both solutions that a rewriter or selector sees are right half of the time."""
    right, role = number[::-1], rng.choice(["solver", "rewriter", "selector"])
    kind = rng.choice(["right", "right", "copy", "guess"])
    shown = [rng.choice([right, rng.choice([number, guess(rng)])]) for _ in range(2)]
    prompt = question(number)
    if role != "solver":
        solutions = "\n\n".join(f"Solution {place}:\n{boxed(text)}" for place, text in enumerate(shown, 1))
        prompt["content"] = TEMPLATES[role].format(problem=prompt["content"], solutions=solutions)
    if role == "selector":
        places = [place for place, text in enumerate(shown, 1) if text == right]
        named = rng.choice(places if kind == "right" and places else [1, 2])
        answer = boxed(shown[0]) if kind == "copy" else f"Judgment: {named}"
    else:
        wrong = [text for text in (number, *(shown if role == "rewriter" else ())) if text != right]
        answer = boxed(right if kind == "right" else wrong[-1] if kind == "copy" else guess(rng))
    return [prompt, {"role": "assistant", "content": answer}]


def write_data(args: argparse.Namespace) -> dict[str, int]:
    """Write all files; returns rows per JSONL file."""
    every, rng = numbers(), random.Random(args.seed)
    held_out, training = every[:NUM_EVAL], every[NUM_EVAL:]
    shown = ({"messages": demonstration(rng.choice(training), rng)} for _ in range(args.num_demonstrations))
    counts = {"sft.jsonl": write_jsonl(args.output / "sft.jsonl", shown)}
    for name, asked in (("train.jsonl", training), ("eval.jsonl", held_out)):
        rows = ({"prompt": [question(number)], "label": number[::-1]} for number in asked)
        counts[name] = write_jsonl(args.output / name, rows)
    dataset: dict[str, Any] = {"name": "chosen", "path": str(args.output / "eval.jsonl")}
    dataset |= {"input_key": "prompt", "label_key": "label"}
    write_eval_config(
        args.output / "eval.yaml", dataset, samples=args.eval_samples, max_response_len=MAX_RESPONSE_TOKENS
    )
    settings = {"multi_agent": {"num_parallel": 2, "templates": TEMPLATES}}
    (args.output / "multi_agent.yaml").write_text(json.dumps(settings, indent=2) + "\n")  # JSON is YAML
    return counts


if __name__ == "__main__":
    write_and_say(write_data, data_parser(__doc__))
