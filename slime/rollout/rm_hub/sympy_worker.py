"""A child process that decides whether two expressions are equal; run as a script, never imported by the parent.

Protocol: it writes "ready", then for each line `{"a": str, "b": str, "limit_s": float}` on stdin one line "1" or "0".
Each check runs under an alarm of the kernel: past the limit the process dies, wherever sympy is, and the parent sees
the end of the stream. It ends when stdin does.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from typing import Any

MEMORY_LIMIT_BYTES = 4 << 30
ALLOWED = re.compile(r"[0-9a-zA-Z+\-*/^(). !]+")
NAMES = {"sqrt", "pi", "oo", "sin", "cos", "tan", "log", "ln", "exp"}


def parse(text: str) -> Any:
    """A sympy expression; raises ValueError for text that is no plain formula, because sympy's parser evaluates it."""
    from sympy.parsing import sympy_parser

    if not ALLOWED.fullmatch(text) or re.search(r"[a-zA-Z)]\.|\.[a-zA-Z(]", text):
        raise ValueError(f"no plain formula: {text!r}")
    if any(len(name) > 3 and name not in NAMES for name in re.findall(r"[a-zA-Z]+", text)):
        raise ValueError(f"unknown name in {text!r}")
    transformations = (
        *sympy_parser.standard_transformations,
        sympy_parser.implicit_multiplication_application,
        sympy_parser.convert_xor,
    )
    return sympy_parser.parse_expr(text, transformations=transformations)


def is_equal(a: str, b: str) -> bool:
    """Whether a - b simplifies to zero; text that does not parse is not equal to anything."""
    import sympy

    try:
        return bool(sympy.simplify(parse(a) - parse(b)) == 0)
    except Exception:  # any text may come here and sympy raises nearly any type: all mean "not shown equal"
        return False


def main() -> None:
    """Serve checks until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent closes stdin
    sys.set_int_max_str_digits(100_000)
    import sympy  # noqa: F401  (takes a second: not inside the first check's limit)
    from sympy.parsing import sympy_parser  # noqa: F401

    is_equal("x+1", "1+x")  # simplify imports more on first use
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
        answer = is_equal(request["a"], request["b"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write("1\n" if answer else "0\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
