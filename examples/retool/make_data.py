r"""Write the data of the tiny run: arithmetic that a tiny model cannot do in its head, but can write as a program.

    python examples/retool/make_data.py --output outputs/retool/data

Files: train.jsonl and eval.jsonl (no problem is in both), sft.jsonl (demonstrations: half compute rightly, a quarter
print nothing and guess, a quarter guess at once), eval.yaml, and tools.yaml (for --custom-config-path).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tool_sandbox import SCHEMA

HELD_OUT_SEED = 20261127  # fixed: every seed of a run is evaluated on the same problems
# Each is one token of the tiny tokenizer, about as words are in a large one.
PIECES = [
    *("<tool_call>", '{"name": "', "code_interpreter", '", "arguments": {"code": "', "print(", '"}}', "</tool_call>"),
    *("<interpreter>\n", "\n</interpreter>", "Answer: \\boxed{"),
]
MAX_RESPONSE_TOKENS = 64


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
    """What the user asks."""
    return {"role": "user", "content": f"{expression}="}


def demonstration(expression: str, *, good_share: float, rng: random.Random) -> list[dict[str, str]]:
    """A conversation: a program that prints; or one that does not, and a guess; or a guess at once."""
    kind = "good" if rng.random() < good_share else rng.choice(["silent", "guess"])
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


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """One JSON object a line; returns how many."""
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))
    return len(lines)


def eval_config(eval_path: Path, samples: int) -> str:
    """The evaluation file: temperature 1, several samples a problem."""
    return f"""eval:
  defaults:
    temperature: 1.0
    top_p: 1.0
    n_samples_per_eval_prompt: {samples}
    max_response_len: {MAX_RESPONSE_TOKENS}
  datasets:
    - name: programs
      path: {json.dumps(str(eval_path))}
      input_key: prompt
      label_key: label
      custom_rm_path: generate_with_retool.reward_func
"""


def write_data(args: argparse.Namespace) -> dict[str, int]:
    """Write all files; returns rows per JSONL file."""
    output: Path = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    asked = problems(args.num_eval + args.num_train, random.Random(HELD_OUT_SEED))
    held_out, training = asked[: args.num_eval], asked[args.num_eval :]
    rng = random.Random(args.seed)
    chosen = (rng.choice(training) for _ in range(args.num_demonstrations))
    shown = ({"messages": demonstration(text, good_share=args.good_share, rng=rng)} for text in chosen)
    counts = {"sft.jsonl": write_jsonl(output / "sft.jsonl", shown)}
    for name, expressions in (("train.jsonl", training), ("eval.jsonl", held_out)):
        rows = ({"prompt": [question(text)], "label": value_of(text), "tools": [SCHEMA]} for text in expressions)
        counts[name] = write_jsonl(output / name, rows)
    (output / "eval.yaml").write_text(eval_config(output / "eval.jsonl", args.eval_samples))
    limits = "retool: {python_timeout: 5.0, python_memory_mb: 256, tool_concurrency: 4}"
    (output / "tools.yaml").write_text(
        f"tool_function_path: tool_sandbox.code_interpreter\ntool_timeout_s: 60\n{limits}\n"
    )
    return counts


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the demonstrations")
    parser.add_argument("--num-eval", type=int, default=128, help="held-out problems")
    parser.add_argument("--num-train", type=int, default=8000, help="problems to train on")
    parser.add_argument("--eval-samples", type=int, default=2, help="samples per held-out problem")
    parser.add_argument("--num-demonstrations", type=int, default=128 * 200, help="rows of sft.jsonl")
    parser.add_argument("--good-share", type=float, default=0.5, help="share of demonstrations that compute rightly")
    return parser


def main() -> None:
    """Write the data and say what is in it."""
    args = build_parser().parse_args()
    for name, count in write_data(args).items():
        print(f"{args.output / name}: {count} rows")


if __name__ == "__main__":
    main()
