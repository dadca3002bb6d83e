"""The DAPO reward: the integer on the last "Answer:" line, compared in the normal form of the Minerva paper.

It knows only two strings. The score is +1 or -1, so the reward is a dict and needs `--reward-key score`.
"""

from __future__ import annotations

import re
from typing import Any

TAIL_CHARS = 300
NO_ANSWER = "[INVALID]"
ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
# Words that follow or surround a number without changing it, as in the appendix of the Minerva paper.
IGNORED_WORDS = re.compile(
    r"\b(?:square|ways|integers|dollars|mph|inches|ft|hours|km|units|points|feet|minutes|digits|cents|degrees|cm|gm"
    r"|pounds|meters|meals|edges|students|tickets|multiples|seconds)\b"
)
IGNORED_MARKUP = (
    r"\left",
    r"\right",
    r"\!",
    r"\ ",
    r"\,",
    r"\ldots",
    r"\dots",
    r"^\circ",
    r"^{\circ}",
    r"\%",
    "%",
    r"\$",
)
WRAPPERS = re.compile(r"\\(?:text|textbf|mbox|mathrm|overline|boxed)\{(.*)\}")


def normalize_final_answer(answer: str) -> str:
    """The Minerva normal form of an answer.

    Example:
        >>> normalize_final_answer("x = 1,234 units"), normalize_final_answer("$42$")
        ('1234', '42')
    """
    text = answer.rpartition("=")[2]
    text = IGNORED_WORDS.sub("", text)
    for markup in IGNORED_MARKUP:
        text = text.replace(markup, "")
    text = re.sub(r"^\s*(?:an?|the)\s+", "", text)
    if dollars := re.search(r"\$(.*?)\$", text):
        text = dollars.group(1)
    text = text.replace("$", "").replace(" ", "").replace("\n", "")
    while wrapped := WRAPPERS.search(text):
        text = text[: wrapped.start()] + wrapped.group(1) + text[wrapped.end() :]
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text)
    return text.replace(",", "") if text.replace(",", "").isdigit() else text.rstrip(".")


def compute_score(solution_str: str, ground_truth: object) -> dict[str, Any]:
    """Score a solution by its last "Answer:" line within its last 300 characters.

    Returns:
        `{"score": 1.0 or -1.0, "acc": bool, "pred": str}`; pred is "[INVALID]" without such a line.

    Raises:
        ValueError: the label is no whole number.
    """
    try:
        truth = str(int(float(str(ground_truth))))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"the dapo reward needs a whole number as label, got {ground_truth!r}") from error
    lines = ANSWER_LINE.findall(solution_str[-TAIL_CHARS:])
    prediction = normalize_final_answer(lines[-1]) if lines else NO_ANSWER
    is_right = prediction == truth
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": prediction}
