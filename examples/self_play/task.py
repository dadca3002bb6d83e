r"""The task of the tiny run: numbers to be written backwards, of any length up to eight digits.

The proposer decides how long a number is, and a long one is hard.
"""

from __future__ import annotations

import re

QUESTION = " backwards?"
_NUMBER = re.compile(r"\\boxed\{([1-9]{1,8})\}")


def problem_of(text: str) -> str | None:
    r"""Return the question that a proposal sets, None where it is no number in a box.

    Example:
        >>> problem_of(r"\boxed{123}"), problem_of("123"), problem_of(r"\boxed{}")
        ('123 backwards?', None, None)
    """
    found = _NUMBER.fullmatch(text.strip())
    return found[1] + QUESTION if found else None


def score(question: str, text: str) -> float:
    r"""Return 1 where an answer is right.

    Example:
        >>> score("123 backwards?", r"\boxed{321}"), score("123 backwards?", "321")
        (1.0, 0.0)
    """
    found = _NUMBER.fullmatch(text.strip())
    return float(bool(found) and found[1] == question.removesuffix(QUESTION)[::-1])
