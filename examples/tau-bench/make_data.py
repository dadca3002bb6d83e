"""Write the data of the tiny run: tasks of the shop, and demonstrations of how to serve its customers.

    python examples/tau-bench/make_data.py --output outputs/tau-bench/data

Files: shop_train_tasks.jsonl and shop_test_tasks.jsonl (no task is in both), sft.jsonl (demonstrations about orders
of the split "train": half are right, a quarter say that it is done without doing it, a quarter use the wrong tool),
eval.yaml, and tau.yaml (for --custom-config-path).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import shop
from tau1_mock import write_tasks

DONE = "You have your money back."
QUESTION = "Which order number?"
CALL, ORDER_ID, CALL_END = '<tool_call>{"name": "', '", "arguments": {"order_id": "', '"}}</tool_call>'
NAMES = [tool["function"]["name"] for tool in shop.TOOLS]
# Each is one token of the tiny tokenizer, about as words are in a large one.
PIECES = [
    *(shop.POLICY, shop.WISH, shop.STOP, "It is ", DONE, QUESTION, CALL, ORDER_ID, CALL_END, *NAMES, *shop.ITEMS),
    *('{"item": "', '", "status": "', '"}', "pending", "delivered", *shop.DONE.values(), "error: "),
    *("no such order", "the order is "),
]
MAX_TURN_TOKENS = 12  # a call has 7


def call(name: str, order_id: str) -> dict[str, str]:
    """A turn of the model that calls a tool."""
    return {"role": "assistant", "content": f"{CALL}{name}{ORDER_ID}{order_id}{CALL_END}"}


def demonstration(task: int, *, good_share: float, rng: random.Random) -> list[dict[str, str]]:
    """A conversation about a task, policy included: a right one, or an empty promise, or one with the wrong tool."""
    order = shop.ORDERS[task]
    kind = "good" if rng.random() < good_share else rng.choice(["empty promise", "wrong tool"])
    database, messages = shop.Shop(), [{"role": "system", "content": shop.POLICY}]
    messages += [
        {"role": "user", "content": shop.opening(task)},
        {"role": "assistant", "content": QUESTION},
        {"role": "user", "content": shop.scripted_reply(task, QUESTION)},
    ]
    wants_cancel = (order.status == "pending") == (kind == "good")
    action = "cancel_order" if wants_cancel else "return_order"
    for name in ("get_order",) if kind == "empty promise" else ("get_order", action):
        try:
            result = database.call(name, {"order_id": order.order_id})
        except shop.ShopError as error:
            result = f"error: {error}"
        messages += [call(name, order.order_id), {"role": "tool", "content": result}]
    return [*messages, {"role": "assistant", "content": DONE}]


def eval_config(path: Path, samples: int) -> str:
    """The evaluation file: temperature 1, several samples a task."""
    return f"""eval:
  defaults:
    temperature: 1.0
    top_p: 1.0
    n_samples_per_eval_prompt: {samples}
    max_response_len: {MAX_TURN_TOKENS}
  datasets:
    - name: shop
      path: {json.dumps(str(path))}
      input_key: index
"""


def write_data(args: argparse.Namespace) -> dict[str, int]:
    """Write all files; returns rows per JSONL file."""
    output: Path = args.output.resolve()
    counts = write_tasks(output, "shop")
    rng, training = random.Random(args.seed), shop.tasks("train")
    chosen = (rng.choice(training) for _ in range(args.num_demonstrations))
    shown = [{"messages": demonstration(task, good_share=args.good_share, rng=rng)} for task in chosen]
    (output / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    (output / "eval.yaml").write_text(eval_config(output / "shop_test_tasks.jsonl", args.eval_samples))
    (output / "tau.yaml").write_text("tau: {env: shop, user_strategy: script}\n")
    return counts | {str(output / "sft.jsonl"): len(shown)}


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the demonstrations")
    parser.add_argument("--eval-samples", type=int, default=2, help="samples per held-out task")
    parser.add_argument("--num-demonstrations", type=int, default=128 * 250, help="rows of sft.jsonl")
    parser.add_argument("--good-share", type=float, default=0.5, help="share of demonstrations that are right")
    return parser


def main() -> None:
    """Write the data and say what is in it."""
    for path, count in write_data(build_parser().parse_args()).items():
        print(f"{path}: {count} rows")


if __name__ == "__main__":
    main()
