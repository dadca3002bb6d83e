"""Grading of a boxed maths answer against a label: normalised strings first, computer algebra last.

The middle turns LaTeX into one spelling of it, and into an expression. The end asks sympy whether two expressions are
equal, with a time limit, in a child process (`sympy_worker.py`): a thread could not be stopped and a signal handler
works in the main thread only; a child can be ended wherever sympy is.

Rollouts ask engines for the stop token (`no_stop_trim`, `skip_special_tokens` off), because the trainer needs its
log-prob. Graders compare answers, so they read the response without it (`without_stop_tokens`).
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import re
import select
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

logger = logging.getLogger(__name__)

BOXED = r"\boxed{"
BRACE = re.compile("[{}]")
FRACTION = re.compile(r"-?\d+/0*[1-9]\d*")
INTEGER = re.compile(r"-?\d+")
DECIMAL = re.compile(r"-?(?:\d+|\d*\.\d+)")
HARD_FOR_SYMPY = re.compile(r"\^\{|\^\(|\^\d\d")
MAX_UNKNOWN_LETTERS = 2
CHECK_LIMIT_S = 2.0
MAX_WORKERS = 2
END_S = 10.0
START_S = 60.0  # Until a child has imported sympy: a second or two, on a busy machine with cold files many more
# On top of a check's limit, which the kernel holds the child to: a child that is later than this was stopped
ANSWER_MARGIN_S = 10.0
TURN_S = 3600.0  # For a free child: each check has its limit, but thousands may wait


def extract_boxed_answer(solution: str) -> str | None:
    r"""The content of the last `\boxed{...}` with balanced braces; None without one.

    Example:
        >>> extract_boxed_answer(r"so \boxed{1} and \boxed{\frac{1}{2}}")
        '\\frac{1}{2}'
    """
    start = solution.rfind(BOXED)
    if start < 0:
        return None
    depth = 0
    for brace in BRACE.finditer(solution, start + len(BOXED) - 1):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return solution[start + len(BOXED) : brace.start()]
    return None


def extract_answer(passage: str) -> str | None:
    """The boxed answer of a passage, None without one (the name that user code imports)."""
    return extract_boxed_answer(passage)


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """Whether the two are equal in LaTeX normal form."""
    return normalize_latex(given_answer) == normalize_latex(ground_truth)


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """Whether the two are equal in algebra form, element by element, with sympy where strings differ.

    A fraction must be reduced as the label is, and an integer is only equal to an integer.
    """
    given_form, truth_form = to_expression(given_answer), to_expression(ground_truth)
    if not given_form or not truth_form:
        return False
    if given_form == truth_form:
        return True
    given_open, given_parts, given_close = bracketed_parts(given_form)
    truth_open, truth_parts, truth_close = bracketed_parts(truth_form)
    if (given_open, given_close, len(given_parts)) != (truth_open, truth_close, len(truth_parts)):
        return False
    return all(_is_same_element(g, t) for g, t in zip(given_parts, truth_parts, strict=True))


def grade_answer(given: str, truth: str) -> bool:
    """Whether an answer (no box around it) is right by either rule."""
    return grade_answer_mathd(given, truth) or grade_answer_sympy(given, truth)


def grade_answer_verl(solution_str: str, ground_truth: object) -> bool:
    r"""Whether the boxed answer of `solution_str` is right; a label inside `\boxed{}` is unwrapped.

    A label of None or "" is never matched; the integer 0 is a label like any other.
    """
    if ground_truth is None or ground_truth == "":
        return False
    given, truth = extract_boxed_answer(solution_str), str(ground_truth)
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


UNITS = "degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard|dollar|cent|unit"
UNIT_PATTERN = re.compile(rf"(?<![a-z\\])(?:{UNITS})(?:es|s)? *(?:\^ *\d+)?(?![a-z])")
LARGE_NUMBERS = {"trillion": 12, "billion": 9, "million": 6}
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))")
PLAIN_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
SYMBOLS = {
    r"\cdot": "*",
    r"\times": "*",
    r"\div": "/",
    r"\pi": "pi",
    r"\infty": "oo",
    r"\cup": "U",
    "×": "*",
    "·": "*",
    "−": "-",
    "π": "pi",
    "∞": "oo",
    "√": "sqrt",
}
MAX_NESTED_FRACTIONS = 20  # Levels that are read; what is deeper stays LaTeX, which no label is
LATEX_FRACTION = r"\frac{"
NEXT_CHARACTER = re.compile(r"\s*(\S?)")
DECORATION = (r"\left", r"\right", r"\!", r"\,", r"\;", r"\:", r"\$", "$", r"^{\circ}", r"^\circ", r"\%", "%")


def normalize_latex(answer: str) -> str:
    """The LaTeX normal form: two answers that differ only in how they are written become equal strings.

    Example:
        >>> normalize_latex("0.5"), normalize_latex(r"\\dfrac12"), normalize_latex("x = 5")
        ('\\\\frac{1}{2}', '\\\\frac{1}{2}', '5')
    """
    text = answer.strip()
    if wrapped := re.fullmatch(r"\\text\{(.+?)\}", text):
        text = wrapped.group(1).strip()
    text = text.replace("\n", "").replace("\\\\", "\\")
    text = re.sub(r"\\[td]frac", r"\\frac", text)
    text = _remove_all(text, DECORATION)
    text = text.split(r"\text{ ", 1)[0]  # a unit set as text after the number
    text = re.sub(r"(^|[ {])\.(?=\d)", r"\g<1>0.", text)
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left.strip()) <= 2:
        text = right
    text = re.sub(r"\\sqrt\s*([^{\s\[])", r"\\sqrt{\1}", text).replace(" ", "")
    text = _brace_fractions(text)
    if text == "0.5":
        return r"\frac{1}{2}"
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


def to_expression(answer: str) -> str:
    """The algebra form: lower-case plain text with `+ - * / ^ ( )`, without units, thousands separators and markup.

    A fraction of two plain numbers stays `a/b`; larger parts are put in parentheses.

    Example:
        >>> to_expression(r"2\\sqrt{2}"), to_expression("1,000 cm"), to_expression(r"\\frac{x+1}{2}")
        ('2sqrt(2)', '1000', '(x+1)/2')
    """
    closed, brace, rest = answer.strip().rpartition(
        "}"
    )  # up to it every \text{ has an end, and none is sought in vain
    text = re.sub(r"\\(?:text|mathrm|mbox|textbf)\{([^}]*)\}", r"\1", closed + brace) + rest
    text = re.sub(r"\\[td]frac", r"\\frac", _remove_all(text, DECORATION))
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, exponent in LARGE_NUMBERS.items():
        text = re.sub(rf"(?<!\s)\s*\b{word}\b", f"*10^{exponent}", text)
    text = UNIT_PATTERN.sub("", text)
    text = re.sub(r"^[a-zA-Z]\s*=\s*", "", text.strip())
    for symbol, plain in SYMBOLS.items():
        text = text.replace(symbol, plain)
    text = _brace_fractions(text)
    text = _plain_roots(_plain_span(text, 0, len(text), _closings(text), depth=0))
    text = re.sub(r"(\d) +(\d+/\d+)", r"\1+\2", text)  # a mixed number
    text = text.replace(" ", "").replace("{", "(").replace("}", ")").lower()
    text = THOUSANDS.sub("", text)
    if re.fullmatch(r"-?\d+\.0*", text):
        text = text.split(".")[0]
    return text[1:-1] if re.fullmatch(r"\((-?\d+)\)", text) else text


def bracketed_parts(expression: str) -> tuple[str, list[str], str]:
    """Opening bracket, elements, closing bracket; no brackets and one element when it is no tuple or interval.

    Example:
        >>> bracketed_parts("(1,f(2,3)]")
        ('(', ['1', 'f(2,3)'], ']')
    """
    if len(expression) < 3 or expression[0] not in "([" or expression[-1] not in ")]":
        return "", [expression], ""
    parts, depth, start = [], 0, 1
    for mark in re.finditer(r"[()\[\],]", expression[1:-1]):
        depth += (mark[0] in "([") - (mark[0] in ")]")
        if depth < 0:
            return "", [expression], ""  # (1,2)(3,4): the outer brackets are no pair
        if mark[0] == "," and depth == 0:
            parts.append(expression[start : mark.start() + 1])
            start = mark.end() + 1
    if not parts:
        return "", [expression], ""
    return expression[0], [*parts, expression[start:-1]], expression[-1]


def _remove_all(text: str, pieces: tuple[str, ...]) -> str:
    for piece in pieces:
        text = text.replace(piece, "")
    return text


def _brace_fractions(text: str) -> str:
    r"""`\frac12` and `\frac1{23}` to `\frac{1}{2}` and `\frac{1}{23}`."""
    text = re.sub(r"\\frac\s*([^{\s\\])", r"\\frac{\1}", text)
    return re.sub(r"(\\frac\{[^{}]*\})\s*([^{\s\\])", r"\1{\2}", text)


def _closings(text: str) -> dict[int, int]:
    """Index of each brace that is closed -> index of the brace that closes it."""
    opened: list[int] = []
    closings: dict[int, int] = {}
    for brace in re.finditer("[{}]", text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closings[opened.pop()] = brace.start()
    return closings


def _plain_span(text: str, start: int, end: int, closings: dict[int, int], depth: int) -> str:
    pieces = []
    while depth < MAX_NESTED_FRACTIONS and (position := text.find(LATEX_FRACTION, start, end)) >= 0:
        opening = position + len(LATEX_FRACTION) - 1
        middle = closings.get(opening)
        last = None if middle is None else closings.get(middle + 1)
        if middle is None or last is None:
            break
        parts = [_plain_span(text, opening + 1, middle, closings, depth + 1)]
        parts += [_plain_span(text, middle + 2, last, closings, depth + 1)]
        fraction = "/".join(map(_part, parts))
        before, following = text[start:position].rstrip(), NEXT_CHARACTER.match(text, last + 1, end)
        if before and before[-1].isdigit():
            fraction = f" {fraction}"  # a mixed number, as in 1\frac{1}{2}
        elif following and following[1] and following[1] not in "+-=,)]}":
            fraction = f"({fraction})"
        pieces += [text[start:position], fraction]
        start = last + 1
    return "".join([*pieces, text[start:end]])


def _part(content: str) -> str:
    inner = content.strip()
    return inner if PLAIN_NUMBER.fullmatch(inner) or len(inner) == 1 else f"({inner})"


def _plain_roots(text: str) -> str:
    text = re.sub(r"\\sqrt\s*\[(\d+)\]\s*\{([^{}]*)\}", r"((\2)^(1/\1))", text)
    text = re.sub(r"\\sqrt\s*([^{\s\[])", r"sqrt(\1)", text)
    return text.replace(r"\sqrt", "sqrt")


# Names of end-of-turn and end-of-text tokens, and of the roles whose turn would follow. No other special token: a tag
# such as <|end_of_box|> may belong to the answer.
_NAMES = (
    "im_end|endoftext|end_of_text|eot_id|eom_id|eot|eos|end|end_of_turn|end_of_sentence|return|call"
    "|im_start|user|assistant|observation|system"
)
_STOP_TOKENS = re.compile(rf"(?:(?:<\|(?:{_NAMES})\|>|<｜[\w▁]{{1,40}}｜>|</s>|<eos>|<end_of_turn>|\[e~\[)\s*)+\Z")
_WINDOW_CHARS = 256  # longer than any such token: the search does not walk through the whole response


def without_stop_tokens(response: str) -> str:
    """Return the response without the end-of-turn tokens at its end, and without the blanks after them.

    Example:
        >>> without_stop_tokens("Answer: 42<|im_end|>\\n<|endoftext|>")
        'Answer: 42'
        >>> without_stop_tokens("<|im_start|>Answer: 42 \\n")
        '<|im_start|>Answer: 42 \\n'
    """
    end = len(response)
    while run := _STOP_TOKENS.search(response, max(0, end - _WINDOW_CHARS), end):
        end = run.start()
    return response[:end]


class _Late(Exception):
    """The child did nothing until the deadline."""


class _Worker:
    """One child; started on first use and again after a check that it did not survive."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def is_equal(self, a: str, b: str, limit_s: float) -> bool | None:
        """The child's verdict, or None when it died on the check, or was stopped and then ended."""
        child, request = self._running(), json.dumps({"a": a, "b": b, "limit_s": limit_s}) + "\n"
        allowed_s = limit_s + ANSWER_MARGIN_S
        try:
            answer = _answer_of(child, request.encode(), allowed_s)
        except BrokenPipeError:
            answer = ""
        except _Late:
            logger.error("the sympy child %d did not answer within %.0f s and was ended", child.pid, allowed_s)
            answer = ""
        if not answer:
            self.end()
            return None
        return answer == "1"

    def end(self) -> None:
        """Kill the child."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(END_S)  # it was killed
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    stream.close()
            self.process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None or self.process.poll() is not None:
            self.process = _start()
            try:
                said = _answer_of(self.process, b"", START_S)
            except _Late:
                self.end()
                raise RuntimeError(f"the sympy child was not ready within {START_S:.0f} s and was ended") from None
            if said != "ready":
                self.end()
                raise RuntimeError("the sympy child did not start; is sympy installed? (pip install sympy)")
        return self.process


def _start() -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("sympy_worker.py")
    # -P: the script's directory must not come first on the path, its module names are no top-level names
    command = [sys.executable, "-P", str(script)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
    )
    for stream in (child.stdin, child.stdout):
        assert stream is not None
        os.set_blocking(stream.fileno(), False)
    return child


def _answer_of(child: subprocess.Popen[bytes], request: bytes, limit_s: float) -> str:
    """Write a request, which a stopped child would not take either, and read the line that answers it.

    Returns:
        the line, or nothing when the child ended before.

    Raises:
        _Late: neither came within `limit_s`.
        BrokenPipeError: the child ended before it took the request.
    """
    assert child.stdin is not None and child.stdout is not None
    end, source, sink = time.monotonic() + limit_s, child.stdout.fileno(), child.stdin.fileno()
    while request:
        _wait_for(sink, select.POLLOUT, end)
        request = request[os.write(sink, request) :]
    answer = b""
    while not answer.endswith(b"\n"):
        _wait_for(source, select.POLLIN, end)
        if not (more := os.read(source, 4096)):
            return ""
        answer += more
    return answer.decode().strip()


def _wait_for(descriptor: int, event: int, end: float) -> None:
    poll = select.poll()  # not select.select, which takes no descriptor above 1023
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
        raise _Late


class _Pool:
    """The children of this process; each serves one thread at a time."""

    def __init__(self) -> None:
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker() for _ in range(MAX_WORKERS)]
        for worker in self._workers:
            self._idle.put(worker)
        atexit.register(self.end)

    def is_equal(self, a: str, b: str, limit_s: float) -> bool | None:
        worker = self._idle.get(timeout=TURN_S)
        try:
            return worker.is_equal(a, b, limit_s)
        finally:
            self._idle.put(worker)

    def end(self) -> None:
        for worker in self._workers:
            worker.end()


_pool = _Pool()


def is_symbolically_equal(a: str, b: str, *, limit_s: float = CHECK_LIMIT_S) -> bool:
    """Whether `a - b` simplifies to zero within `limit_s`; a check that takes longer counts as False and is logged.

    Blocks the calling thread for up to the limit (plus about 2 s for the first check of a process).
    """
    verdict = _pool.is_equal(a, b, limit_s)
    if verdict is None:
        logger.warning("sympy check stopped after %.1f s, counted as wrong: %.80r against %.80r", limit_s, a, b)
    return bool(verdict)
