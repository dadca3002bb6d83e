"""The DAPO reward: the integer on the last "Answer:" line, compared in the normal form of the Minerva paper.

The score is +1 or -1, so the reward is a dict and needs `--reward-key score`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from slime.rollout.rm_hub.math_utils import extract_boxed_answer, without_stop_tokens

TAIL_CHARS = 300
BOX_TAIL_CHARS = 100
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


def normalize_final_answer(final_answer: str) -> str:
    """The Minerva normal form of an answer.

    Example:
        >>> normalize_final_answer("x = 1,234 units"), normalize_final_answer("$42$")
        ('1234', '42')
    """
    text = final_answer.rpartition("=")[2]
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


def compute_score(
    solution_str: str,
    ground_truth: object,
    strict_box_verify: bool = False,
    pause_tokens_index: Sequence[int] | None = None,
) -> dict[str, Any]:
    r"""Score a solution by its last "Answer:" line within its last 300 characters.

    The engine's stop token at the end of the solution does not count.

    Args:
        solution_str: the response.
        ground_truth: a whole number; with `strict_box_verify` any text.
        strict_box_verify: compare the last `\boxed{...}` within the last 100 characters with the label, as strings.
        pause_tokens_index: four positions in the last 300 characters; the box is then sought from 100 characters
            before the last of them. Only read with `strict_box_verify`.

    Returns:
        A dict `{"score": 1.0 or -1.0, "acc": bool, "pred": str}`; pred is "[INVALID]" without such a line, and None
        without a box under `strict_box_verify`.

    Raises:
        ValueError: the label is no whole number, or `pause_tokens_index` has another length.
    """
    tail = without_stop_tokens(solution_str)[-TAIL_CHARS:]
    prediction: str | None
    if strict_box_verify:
        prediction, truth = _strict_box(tail, pause_tokens_index), str(ground_truth)
    else:
        lines = ANSWER_LINE.findall(tail)
        prediction, truth = normalize_final_answer(lines[-1]) if lines else NO_ANSWER, _whole_number(ground_truth)
    is_right = prediction == truth
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": prediction}


def _strict_box(tail: str, pause_tokens_index: Sequence[int] | None) -> str | None:
    if pause_tokens_index is None:
        return extract_boxed_answer(tail[-BOX_TAIL_CHARS:])
    if len(pause_tokens_index) != 4:
        raise ValueError(f"pause_tokens_index needs four positions, got {pause_tokens_index!r}")
    return extract_boxed_answer(tail[max(0, pause_tokens_index[-1] - BOX_TAIL_CHARS) :])


def _whole_number(label: object) -> str:
    try:
        return str(int(float(str(label))))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"the dapo reward needs a whole number as label, got {label!r}") from error
