r"""Write the data of the tiny run: demonstrations of both roles, and held-out problems, but none to train on.

    python examples/self_play/make_data.py --output outputs/self_play/data

Files: train.jsonl (one prompt, "Set a problem.", for every proposal), eval.jsonl (held-out numbers of four digits),
sft.jsonl (proposals of one to six digits, of which one in five is none; answers of which half are right), eval.yaml,
and self_play.yaml (for --custom-config-path).
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

from examples.multi_agent.make_data import NUM_EVAL, boxed, numbers
from examples.self_play.task import QUESTION
from examples.tiny import data_parser, write_and_say, write_eval_config, write_jsonl

PROPOSE = "Set a problem."
# Each is one token of the tiny tokenizer, about as words are in a large one.
PIECES = [QUESTION, PROPOSE, "\\boxed{"]
MAX_RESPONSE_TOKENS = 11  # a number of eight digits has that many with its box and the end


def digits(rng: random.Random, count: int) -> str:
    """Any number of so many digits, without a 0."""
    return "".join(rng.choices("123456789", k=count))


def demonstration(held_out: frozenset[str], rng: random.Random) -> list[dict[str, str]]:
    """One role's prompt and answer."""
    number = digits(rng, rng.randint(1, 6))
    if rng.random() < 0.3:
        answer = boxed(number) if rng.random() < 0.8 else rng.choice([number, boxed("")])
        return [{"role": "user", "content": PROPOSE}, {"role": "assistant", "content": answer}]
    while number in held_out:
        number = digits(rng, len(number))
    right = rng.random() < 0.5
    answer = boxed(number[::-1] if right else rng.choice([number, digits(rng, len(number))]))
    return [{"role": "user", "content": number + QUESTION}, {"role": "assistant", "content": answer}]


def write_data(args: argparse.Namespace) -> dict[str, int]:
    """Write all files; returns rows per JSONL file."""
    held_out, rng = numbers()[:NUM_EVAL], random.Random(args.seed)
    hidden = frozenset(held_out)
    shown = ({"messages": demonstration(hidden, rng)} for _ in range(args.num_demonstrations))
    counts = {"sft.jsonl": write_jsonl(args.output / "sft.jsonl", shown)}
    propose = {"prompt": [{"role": "user", "content": PROPOSE}]}
    # A run evaluates after each pass over its prompts, too: there are enough for one.
    counts["train.jsonl"] = write_jsonl(args.output / "train.jsonl", [propose] * 4096)
    rows = ({"prompt": [{"role": "user", "content": number + QUESTION}], "label": number[::-1]} for number in held_out)
    counts["eval.jsonl"] = write_jsonl(args.output / "eval.jsonl", rows)
    dataset: dict[str, Any] = {"name": "backwards", "path": str(args.output / "eval.jsonl")}
    dataset |= {"input_key": "prompt", "label_key": "label"}
    write_eval_config(
        args.output / "eval.yaml", dataset, samples=args.eval_samples, max_response_len=MAX_RESPONSE_TOKENS
    )
    (args.output / "self_play.yaml").write_text(json.dumps({"self_play": {"num_solvers": 4}}, indent=2) + "\n")
    return counts


if __name__ == "__main__":
    write_and_say(write_data, data_parser(__doc__))
