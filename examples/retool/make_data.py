r"""Write the data of the tiny run: arithmetic that a tiny model cannot do in its head, but can write as a program.

    python examples/retool/make_data.py --output outputs/retool/data

Files: train.jsonl and eval.jsonl (no problem is in both), sft.jsonl (demonstrations: four in ten compute rightly, one
prints nothing and guesses, five guess at once), eval.yaml, and tools.yaml (for --custom-config-path).
"""

from __future__ import annotations

import argparse
import json
import random

from tool_sandbox import SCHEMA

from examples.tiny import data_parser, write_and_say, write_eval_config, write_jsonl

HELD_OUT_SEED = 20261127  # fixed: every seed of a run is evaluated on the same problems
# Each is one token of the tiny tokenizer, about as words are in a large one.
PIECES = [
    *("<tool_call>", '{"name": "', "code_interpreter", '", "arguments": {"code": "', "print(", '"}}', "</tool_call>"),
    *("<interpreter>\n", "\n</interpreter>", "Answer: \\boxed{"),
]
MAX_RESPONSE_TOKENS = 64
NUM_EVAL = 128


def problems(count: int, rng: random.Random) -> list[str]:
    """Different expressions a*b-c, with numbers of two digits."""
    numbers = [f"{n // 8100 + 10}*{n // 90 % 90 + 10}-{n % 90 + 10}" for n in rng.sample(range(90**3), count)]
    return numbers


def value_of(expression: str) -> str:
    """The value of one of `problems`."""
    product, _, less = expression.partition("-")
    factors = [int(factor) for factor in product.split("*")]
    return str(factors[0] * factors[1] - int(less))


def question(expression: str) -> dict[str, str]:
    """Return the text of the user's message."""
    return {"role": "user", "content": f"{expression}="}


def demonstration(expression: str, *, rng: random.Random) -> list[dict[str, str]]:
    """A conversation: a program that prints; or one that does not, and a guess; or a guess at once.

    Most of them guess: a run that only becomes surer of what it does gains nothing.
    """
    [kind] = rng.choices(["good", "silent", "guess"], [4, 1, 5])
    value = value_of(expression) if kind == "good" else str(rng.randrange(10, 9900))
    answer = {"role": "assistant", "content": f"Answer: \\boxed{{{value}}}"}
    if kind == "guess":
        return [question(expression), answer]
    code, printed = (f"print({expression})", value) if kind == "good" else (expression, "")
    call = json.dumps({"name": "code_interpreter", "arguments": {"code": code}})
    return [
        question(expression),
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": f"<interpreter>\n{printed}\n</interpreter>"},
        answer,
    ]


def write_data(args: argparse.Namespace) -> dict[str, int]:
    """Write all files; returns rows per JSONL file."""
    output = args.output
    asked = problems(NUM_EVAL + args.num_train, random.Random(HELD_OUT_SEED))
    held_out, training = asked[:NUM_EVAL], asked[NUM_EVAL:]
    rng = random.Random(args.seed)
    chosen = (rng.choice(training) for _ in range(args.num_demonstrations))
    shown = ({"messages": demonstration(text, rng=rng)} for text in chosen)
    counts = {"sft.jsonl": write_jsonl(output / "sft.jsonl", shown)}
    for name, expressions in (("train.jsonl", training), ("eval.jsonl", held_out)):
        rows = ({"prompt": [question(text)], "label": value_of(text), "tools": [SCHEMA]} for text in expressions)
        counts[name] = write_jsonl(output / name, rows)
    dataset = {"name": "programs", "path": str(output / "eval.jsonl"), "input_key": "prompt", "label_key": "label"}
    dataset["custom_rm_path"] = "generate_with_retool.reward_func"
    write_eval_config(output / "eval.yaml", dataset, samples=args.eval_samples, max_response_len=MAX_RESPONSE_TOKENS)
    limits = "retool: {python_timeout: 5.0, python_memory_mb: 256, tool_concurrency: 4}"
    (output / "tools.yaml").write_text(
        f"tool_function_path: tool_sandbox.code_interpreter\ntool_timeout_s: 60\n{limits}\n"
    )
    return counts


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = data_parser(__doc__)
    parser.add_argument("--num-train", type=int, default=8000, help="problems to train on")
    return parser


if __name__ == "__main__":
    write_and_say(write_data, build_parser())
