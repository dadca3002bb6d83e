"""The example's tool: a calculator that parses arithmetic itself, so that nothing a model writes is ever executed.

    tool_function_path: examples.multi_turn_calculator.tool:calculator        (in the file of --custom-config-path)

Numbers are exact fractions. What a model gets wrong is a `ToolError`, whose text the model reads.
"""

from __future__ import annotations

import re
from argparse import Namespace
from fractions import Fraction
from typing import Any

from slime.rollout.multi_turn import ToolError
from slime.utils.types import Sample

MAX_CHARACTERS = 200
MAX_EXPONENT = 64
MAX_BITS = 4096  # of a number on the way; together with the exponent's limit a call takes microseconds
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "The exact value of an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "numbers, + - * / // % ** and parentheses"}
            },
            "required": ["expression"],
        },
    },
}
_TOKEN = re.compile(r"\s*(\d+\.?\d*|\.\d+|\*\*|//|[-+*/%()])")


def calculator(args: Namespace, sample: Sample, name: str, arguments: dict[str, Any]) -> str:
    """The tool function: evaluates `arguments["expression"]`."""
    expression = arguments.get("expression")
    if not isinstance(expression, str):
        raise ToolError('the argument "expression" must be a text')
    return show(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """The value of an expression, with Python's precedence.

    Raises:
        ToolError: it is no arithmetic, divides by zero, or is too large.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression has more than {MAX_CHARACTERS} characters")
    return _Parser(_tokens(expression)).whole()


def show(value: Fraction) -> str:
    """A whole number as such, another with up to ten significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _tokens(expression: str) -> list[str]:
    tokens, position = [], 0
    text = expression.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if not match:
            raise ToolError(f"cannot read {text[position:]!r}")
        tokens.append(match[1])
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent: sum of products of signed powers of atoms."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0

    def whole(self) -> Fraction:
        value = self.sum()
        if self.position < len(self.tokens):
            raise ToolError(f"unexpected {self.tokens[self.position]!r}")
        return value

    def sum(self) -> Fraction:
        value = self.product()
        while operator := self.take("+", "-"):
            right = self.product()
            value = checked(value + right if operator == "+" else value - right)
        return value

    def product(self) -> Fraction:
        value = self.signed()
        while operator := self.take("*", "/", "//", "%"):
            right = self.signed()
            if operator == "*":
                value = checked(value * right)
                continue
            if right == 0:
                raise ToolError("division by zero")
            value = checked({"/": value / right, "//": Fraction(value // right), "%": value % right}[operator])
        return value

    def signed(self) -> Fraction:
        if operator := self.take("-", "+"):
            return -self.signed() if operator == "-" else self.signed()
        base = self.atom()
        return power(base, self.signed()) if self.take("**") else base

    def atom(self) -> Fraction:
        if self.take("("):
            value = self.sum()
            if not self.take(")"):
                raise ToolError("a parenthesis is not closed")
            return value
        token = self.tokens[self.position] if self.position < len(self.tokens) else ""
        if not token or not (token[0].isdigit() or token[0] == "."):
            raise ToolError(f"expected a number, found {token!r}" if token else "the expression ends too early")
        self.position += 1
        return checked(Fraction(token))

    def take(self, *wanted: str) -> str:
        """The next token if it is one of these, else ""."""
        if self.position < len(self.tokens) and self.tokens[self.position] in wanted:
            self.position += 1
            return self.tokens[self.position - 1]
        return ""


def power(base: Fraction, exponent: Fraction) -> Fraction:
    """base ** exponent, for small whole exponents."""
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ToolError(f"an exponent must be a whole number of at most {MAX_EXPONENT}")
    if base == 0 and exponent < 0:
        raise ToolError("division by zero")
    return checked(base ** int(exponent))


def checked(value: Fraction) -> Fraction:
    """The value, unless it has grown out of hand."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError("the numbers are too large")
    return value
