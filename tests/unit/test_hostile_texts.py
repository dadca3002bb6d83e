"""No text that a model may write keeps a grader or a parser busy: twice the text costs at most three times the CPU.

A quadratic reader takes four times as long. Texts of 200 kB are compared with texts of 25 kB, three doublings: a
linear reader takes 8 times as long, the limit is 27 times, a quadratic reader takes 64 times. One doubling alone would
leave too little room for what a busy machine adds. A reader that is quick at 25 kB is not measured further, because a
quadratic one would then need half a second at 200 kB.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest

from examples.reasoning_gym.reward import last_number
from slime.observability.metric_utils import has_repetition
from slime.rollout.multi_turn import final_answer, next_turn_tokens
from slime.rollout.rm_hub import RM_TYPES, math_utils
from slime.rollout.rm_hub.code_sandbox import extract_code, same_output
from slime.rollout.rm_hub.ifbench import CHECKERS, follows
from slime.rollout.rm_hub.math_utils import bracketed_parts, normalize_latex, to_expression
from slime.rollout.tool_calls import parse_tool_calls
from slime.utils.mask_utils import MultiTurnLossMaskGenerator, find_sublist
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.generators.arithmetic_generator import ArithmeticGenerator
from tests.unit.rollout_fakes import LetterTokenizer
from tests.unit.test_ifbench import NEEDS_DETECTOR
from tests.unit.test_ifbench import TABLE as INSTRUCTIONS

# head, what is repeated, tail
PATTERNS: dict[str, tuple[str, str, str]] = {
    "open fences": ("", "```python\n", ""),
    "closed fences": ("", "```py\nx\n```\n", "```"),
    "backticks": ("", "`", "\n"),
    "open boxes": ("", r"\boxed{", ""),
    "closed boxes": ("", r"\boxed{1}", ""),
    "open fractions": ("", r"\frac{", ""),
    "fractions": ("", r"\frac{1}{2}", ""),
    "nested fractions": (r"\frac{1}{" * 9_000, "}", ""),
    "open text": ("", r"\text{", ""),
    "roots": ("", r"\sqrt[3]{", ""),
    "braces": ("", "{", "}"),
    "brackets": ("", "[", ""),
    "mixed brackets": ("", "([{", ")"),
    "pairs of brackets": ("", "(]", ""),
    "digits": ("", "1", "x"),
    "a long number": ("-", "0", "1"),
    "numbers": ("", "1,234 1/2 ", ""),
    "spaces": ("a", " ", "a"),
    "spaces after an answer": ("final answer", " ", "!"),
    "newlines": ("a", "\n", "a"),
    "blank lines": ("a\n", " \t\n", "a"),
    "backslashes": ("", "\\", ""),
    "open thoughts": ("", "<think>", ""),
    "closed thoughts": ("", "</think>", ""),
    "double quotes": ("", 'a "', ""),
    "single quotes": ("", "'", "a"),
    "end marks": ("", "?!.", "x"),
    "initials": ("", "A. ", ""),
    "sentences": ("", "So it is. Is it? It is! ", ""),
    "separators": ("", "***", ""),
    "bullets": ("", "\n* a\n - b", ""),
    "titles": ("", "<<a", ""),
    "postscripts": ("", "p. ", ""),
    "headings": ("My Answer: a ", "My Conclusion: b ", ""),
    "questions": ("", "\n!\nQuestion A) ", ""),
    "special characters in a quote": ('a,"', "&", ""),
    "commas": ("", ", ", ""),
    "JSON lists": ("", "[1,", ""),
    "JSON objects": ("", '{"a":', ""),
    "a tool call of brackets": ("<tool_call>", "[", ""),
    "tool calls": ("", '<tool_call>{"name": "a", "arguments": {', ""),
    "chat markers": ("", "<|im_start|>assistant\n", ""),
    "stand-ins": ("StandIn", "X", ""),
    "statements": ("", "the answer is ", ""),
    "emoji": ("", "😀! ", ""),
    "Chinese": ("", "犬", ""),
    "combining marks": ("", "e\u0301\u200d", ""),
    "units": ("", "million meter ^ ", ""),
}
WHOLE, EIGHTH, FORTIETH = 200_000, 25_000, 5_000
MOST_TIMES = 3**3  # three doublings from an eighth to the whole
QUICK_S = 0.008
SLOW_S = 0.5
LABEL, CHOICES = "42", {"choices": ["London", "Paris"]}
FLAGS = Namespace()
Reader = Callable[[str], Any]


def text_of(pattern: str, size: int) -> str:
    head, unit, tail = PATTERNS[pattern]
    head = head[: size // 2]
    return head + unit * ((size - len(head)) // len(unit)) + tail


def graded(rm_type: str, before: str = "", after: str = "") -> Reader:
    def read(text: str) -> Any:
        sample = Sample(label=LABEL, metadata=CHOICES if "gpqa" in rm_type else {})
        found = RM_TYPES[rm_type](FLAGS, before + text + after, sample)
        return asyncio.run(found) if inspect.iscoroutine(found) else found

    return read


def next_turn(text: str) -> Any:
    said = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    return next_turn_tokens(LetterTokenizer(), said, [{"role": "tool", "content": text}], tokens=[])


def masked(text: str) -> Any:
    generator = MultiTurnLossMaskGenerator(LetterTokenizer())
    return generator._assistant_spans(text)


def last_message(text: str) -> Any:
    messages = [{"role": "assistant", "content": text}]
    return final_answer(Sample(metadata={"messages": messages}, status=Sample.Status.COMPLETED))


def arithmetic(text: str) -> Any:
    return asyncio.run(ArithmeticGenerator.reward(None, Namespace(label=LABEL), Sample(response=text)))


GRADERS = ("math", "deepscaler", "dapo", "f1", "gpqa")
READERS: dict[str, Reader] = {
    **{f"{boxed}{name}": graded(boxed + name) for name in GRADERS for boxed in ("", "boxed_")},
    **{f"{name} in a box": graded(name, r"</think>\boxed{", "}") for name in ("math", "boxed_f1", "boxed_gpqa")},
    "dapo after Answer:": graded("dapo", "Answer:"),
    "grade a tuple": lambda text: math_utils.grade_answer(f"({text},1)", "(1,1)"),
    "grade a decimal": lambda text: math_utils.grade_answer(text, "0.25"),
    "normalize_latex": normalize_latex,
    "to_expression": to_expression,
    "bracketed_parts": lambda text: bracketed_parts(f"({text})"),
    "extract_code": extract_code,
    "same_output": lambda text: same_output(text, text + "x"),
    "parse_tool_calls": parse_tool_calls,
    "final_answer": last_message,
    "next_turn_tokens": next_turn,
    "assistant spans": masked,
    "find_sublist": lambda text: find_sublist(list(text), [*text[:8], ""]),
    "has_repetition": has_repetition,
    "last_number": lambda text: asyncio.run(last_number(FLAGS, Sample(response=text, label=LABEL))),
    "arithmetic_generator": arithmetic,
}
# The first row of each instruction; all follow from a reader of the response and some arguments.
for _name, _arguments, _, _ in INSTRUCTIONS:
    READERS.setdefault(_name, lambda text, name=_name, given=_arguments: follows(text, name, given))


@pytest.fixture(autouse=True)
def _without_sympy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs in a child under an alarm of two seconds (test_rm_hub); here the strings alone are measured."""
    monkeypatch.setattr(math_utils, "is_symbolically_equal", lambda a, b: False)


def cpu_s(read: Reader, text: str, tries: int = 1) -> float:
    gc.disable()  # a collection looks through whatever other tests have left
    try:
        return min(_once(read, text) for _ in range(tries))
    finally:
        gc.enable()


def _once(read: Reader, text: str) -> float:
    begin = time.process_time()
    read(text)
    return time.process_time() - begin


def problem_of(read: Reader, pattern: str) -> str | None:
    """Why a reader does not grow linearly on a pattern; None where it does. A slow one is found on a short text."""
    if cpu_s(read, text_of(pattern, FORTIETH)) > SLOW_S / 5:
        return f"{pattern}: slow at {FORTIETH} characters"
    if (eighth := cpu_s(read, text_of(pattern, EIGHTH))) < QUICK_S:
        return None
    if eighth > SLOW_S:
        return f"{pattern}: {eighth:.2f} s at {EIGHTH} characters"
    if (whole := cpu_s(read, text_of(pattern, WHOLE))) > MOST_TIMES * eighth:  # or something else took the time
        eighth, whole = (cpu_s(read, text_of(pattern, size), tries=5) for size in (EIGHTH, WHOLE))
    is_linear = whole <= MOST_TIMES * eighth
    return None if is_linear else f"{pattern}: {eighth:.3f} s at {EIGHTH} characters, {whole:.3f} s at {WHOLE}"


@pytest.mark.parametrize("name", READERS)
def test_no_pattern_costs_a_reader_more_than_linear_time(name: str) -> None:
    problems = [problem for pattern in PATTERNS if (problem := problem_of(READERS[name], pattern))]
    assert not problems, f"{name}: {'; '.join(problems)}"


def test_every_instruction_and_every_reward_that_reads_a_text_is_measured() -> None:
    asks_a_service = {"remote_rm", "classify", "code", "random"}  # extract_code is in the list by itself
    assert set(CHECKERS) - set(READERS) == NEEDS_DETECTOR
    assert {name.removeprefix("boxed_") for name in RM_TYPES} - asks_a_service - {"ifbench"} == set(GRADERS)
    assert len(PATTERNS) >= 35
