"""A shop of our own: orders, tools that change them, customers who want something, and what is right in the end.

The same task number gives the same order, customer and wish. It imports nothing from slime: `tau_environments` puts
the shop behind the interface that tau2's environments have.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SEED = 20261127  # fixed: every run has the same orders
NUM_HELD_OUT = 128  # tasks of the split "test"; the others are "train"
ITEMS = ("lamp", "chair", "table", "clock", "radio", "towel", "plate", "scarf")
STOP = "###STOP###"  # what a user says who is done, as in tau-bench
POLICY = (
    "You serve the customers of a shop. Ask for the order number and look the order up. To give money back, cancel an "
    "order that is pending and take back one that is delivered. Touch no other order. At most one tool call a turn."
)
WISH = "I want my money back for the "
DONE = {"pending": "cancelled", "delivered": "returned"}  # status of an order -> status that is right in the end


class ShopError(Exception):
    """The shop refuses a call; the model reads why."""


def _tool(name: str, description: str) -> dict[str, Any]:
    number = {"type": "string", "description": "number of the order"}
    parameters = {"type": "object", "properties": {"order_id": number}, "required": ["order_id"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("get_order", "Show an order."),
    _tool("cancel_order", "Cancel an order that is pending, and pay it back."),
    _tool("return_order", "Take back an order that was delivered, and pay it back."),
]


@dataclass(frozen=True)
class Order:
    """An order as it was when the shop opened."""

    order_id: str
    item: str
    status: str


def _orders() -> list[Order]:
    rng = random.Random(SEED)
    numbers = [str(number) for number in range(100, 1000)]
    rng.shuffle(numbers)
    return [Order(number, rng.choice(ITEMS), rng.choice(list(DONE))) for number in numbers]


ORDERS = _orders()
BY_ID = {order.order_id: order for order in ORDERS}


def tasks(split: str) -> range:
    """The numbers of the tasks of "train" or "test"; no task is in both.

    Raises:
        ValueError: there is no such split.
    """
    if split not in ("train", "test"):
        raise ValueError(f"the shop has the splits train and test, not {split!r}")
    return range(NUM_HELD_OUT) if split == "test" else range(NUM_HELD_OUT, len(ORDERS))


@dataclass
class Shop:
    """The database of an episode: the orders, and what was changed since it opened."""

    changes: dict[str, str] = field(default_factory=dict)  # order -> its new status

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Make a call of a tool; returns what the model reads.

        Raises:
            ShopError: there is no such tool or order, or the order's status does not allow it.
        """
        tools: dict[str, Callable[[Order, str], str]] = {
            "get_order": self._show,
            "cancel_order": lambda order, status: self._change(order, status, needs="pending"),
            "return_order": lambda order, status: self._change(order, status, needs="delivered"),
        }
        if name not in tools:
            raise ShopError(f"no tool {name}; there is {', '.join(tools)}")
        order = BY_ID.get(str(arguments.get("order_id")))
        if order is None:
            raise ShopError("no such order")
        return tools[name](order, self.changes.get(order.order_id, order.status))

    def _show(self, order: Order, status: str) -> str:
        return json.dumps({"item": order.item, "status": status})

    def _change(self, order: Order, status: str, *, needs: str) -> str:
        if status != needs:
            raise ShopError(f"the order is {status}")
        self.changes[order.order_id] = DONE[needs]
        return DONE[needs]

    def is_right(self, task: int) -> bool:
        """Return whether the order of the task is paid back and no other order has changed."""
        order = ORDERS[task]
        return self.changes == {order.order_id: DONE[order.status]}


def opening(task: int) -> str:
    """The first message of a customer; it does not name the order."""
    return f"{WISH}{ORDERS[task].item}."


def scripted_reply(task: int, said: str) -> str:
    """Return a scripted customer's answer: the order number to a question, or else the end of the conversation."""
    return f"It is {ORDERS[task].order_id}." if "?" in said else STOP


def instruction(task: int) -> str:
    """The system message of a customer who is played by a language model."""
    order = ORDERS[task]
    return (
        f"You are a customer of a shop. You say: {opening(task)} The number of your order is {order.order_id}; name "
        "it when you are asked for it. You have no other wish. Answer in one sentence. When the shop says that your "
        f"wish is done or refused, answer {STOP} and nothing else."
    )
