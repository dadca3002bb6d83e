"""Write the data of the tiny run: tasks of the shop, and demonstrations of how to serve its customers.

    python examples/tau-bench/make_data.py --output outputs/tau-bench/data

Files: shop_train_tasks.jsonl and shop_test_tasks.jsonl (no task is in both), sft.jsonl (demonstrations about orders
of the split "train": half are right, a quarter say that it is done without doing it, a quarter use the wrong tool),
eval.yaml, and tau.yaml (for --custom-config-path).
"""

from __future__ import annotations

import argparse
import random

import shop
from tau1_mock import write_tasks

from examples.tiny import data_parser, write_and_say, write_eval_config, write_jsonl

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


def demonstration(task: int, *, rng: random.Random) -> list[dict[str, str]]:
    """A conversation about a task, policy included: a right one, or an empty promise, or one with the wrong tool."""
    order = shop.ORDERS[task]
    kind = rng.choice(["good", "good", "empty promise", "wrong tool"])
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


def write_data(args: argparse.Namespace) -> dict[str, int]:
    """Write all files; returns rows per JSONL file."""
    output, counts = args.output, write_tasks(args.output, "shop")
    rng, training = random.Random(args.seed), shop.tasks("train")
    chosen = (rng.choice(training) for _ in range(args.num_demonstrations))
    counts["sft.jsonl"] = write_jsonl(
        output / "sft.jsonl", ({"messages": demonstration(task, rng=rng)} for task in chosen)
    )
    dataset = {"name": "shop", "path": str(output / "shop_test_tasks.jsonl"), "input_key": "index"}
    write_eval_config(output / "eval.yaml", dataset, samples=args.eval_samples, max_response_len=MAX_TURN_TOKENS)
    (output / "tau.yaml").write_text("tau: {env: shop, user_strategy: script}\n")
    return counts


if __name__ == "__main__":
    write_and_say(write_data, data_parser(__doc__))
