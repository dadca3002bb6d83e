"""Grading of a boxed maths answer against a label: normalised strings first, computer algebra last.

Pure but for the bounded sympy check; it knows nothing of samples or flags.
"""

from __future__ import annotations

import re
from decimal import Decimal

from slime.rollout.rm_hub.bounded_sympy import is_symbolically_equal
from slime.rollout.rm_hub.latex_text import normalize_latex, split_tuple, to_expression

BOXED = r"\boxed{"
BRACE = re.compile("[{}]")
FRACTION = re.compile(r"-?\d+/0*[1-9]\d*")
INTEGER = re.compile(r"-?\d+")
DECIMAL = re.compile(r"-?(?:\d+|\d*\.\d+)")
HARD_FOR_SYMPY = re.compile(r"\^\{|\^\(|\^\d\d")
MAX_UNKNOWN_LETTERS = 2


def extract_boxed_answer(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` with balanced braces; None without one.

    Example:
        >>> extract_boxed_answer(r"so \boxed{1} and \boxed{\frac{1}{2}}")
        '\\frac{1}{2}'
    """
    start = text.rfind(BOXED)
    if start < 0:
        return None
    depth = 0
    for brace in BRACE.finditer(text, start + len(BOXED) - 1):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start + len(BOXED) : brace.start()]
    return None


def extract_answer(passage: str) -> str | None:
    """The boxed answer of a passage, None without one (the name that user code imports)."""
    return extract_boxed_answer(passage)


def grade_answer_mathd(given: str, truth: str) -> bool:
    """Whether the two are equal in LaTeX normal form."""
    return normalize_latex(given) == normalize_latex(truth)


def grade_answer_sympy(given: str, truth: str) -> bool:
    """Whether the two are equal in algebra form, element by element, with sympy where strings differ.

    A fraction must be reduced as the label is, and an integer is only equal to an integer.
    """
    given_form, truth_form = to_expression(given), to_expression(truth)
    if not given_form or not truth_form:
        return False
    if given_form == truth_form:
        return True
    given_open, given_parts, given_close = split_tuple(given_form)
    truth_open, truth_parts, truth_close = split_tuple(truth_form)
    if (given_open, given_close, len(given_parts)) != (truth_open, truth_close, len(truth_parts)):
        return False
    return all(_is_same_element(g, t) for g, t in zip(given_parts, truth_parts, strict=True))


def grade_answer(given: str, truth: str) -> bool:
    """Whether an answer (no box around it) is right by either rule."""
    return grade_answer_mathd(given, truth) or grade_answer_sympy(given, truth)


def grade_answer_verl(solution: str, ground_truth: object) -> bool:
    r"""Whether the boxed answer of `solution` is right; a label inside `\boxed{}` is unwrapped.

    A label of None or "" is never matched; the integer 0 is a label like any other.
    """
    if ground_truth is None or ground_truth == "":
        return False
    given, truth = extract_boxed_answer(solution), str(ground_truth)
    if given is None:
        return False
    if r"\boxed" in truth:
        truth = extract_boxed_answer(truth) or ""
    return grade_answer(given, truth)


def _is_same_element(given: str, truth: str) -> bool:
    if given == truth:
        return True
    if FRACTION.fullmatch(given) and FRACTION.fullmatch(truth):
        return False
    if bool(INTEGER.fullmatch(given)) != bool(INTEGER.fullmatch(truth)):
        return False
    if DECIMAL.fullmatch(given) and DECIMAL.fullmatch(truth):
        return Decimal(given) == Decimal(truth)  # exact, and without the limit of 4,300 digits that int() has
    return _may_go_to_sympy(given) and _may_go_to_sympy(truth) and is_symbolically_equal(given, truth)


def _may_go_to_sympy(expression: str) -> bool:
    letters = {c for c in expression.replace("sqrt", "") if c.isalpha()}
    return len(letters) <= MAX_UNKNOWN_LETTERS and not HARD_FOR_SYMPY.search(expression)
