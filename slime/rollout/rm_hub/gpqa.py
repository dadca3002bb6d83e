"""The multiple-choice reward: which letter does a response settle on, and is it the right one.

It knows a response, a label and the metadata of a question; nothing of samples or flags.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

DEFAULT_LETTERS = tuple(string.ascii_uppercase[:10])
END_OF_REASONING = "</think>"
STATEMENTS = (
    # each run of blanks can be matched in one way only: a run of 10 kB is looked at once
    r"(?i:final\s+answer)\s*(?:(?i:is)\s*)?(?::\s*)?\(?([A-Za-z])\b",
    r"(?i:answer|option|choice)\s*(?:(?i:is)|:)\s*(?::\s*)?\(?([A-Za-z])\b",
    r"\(?\b([A-Z])\)?\s+(?i:is\s+(?:the\s+)?correct)",
)


def compute_gpqa_reward(response: str | None, label: object, metadata: Mapping[str, Any] | None = None) -> float:
    """1.0 when the response settles on the right choice, else 0.0.

    Args:
        response: only the text after the last `</think>` counts.
        label: a letter, the index of a choice, or the text of the right choice.
        metadata: may hold choices (list, or dict by letter), valid_letters, correct_letter,
            correct_answer, answer_text.
    """
    if response is None:
        return 0.0
    facts = dict(metadata or {})
    choices = _choices_by_letter(facts.get("choices"))
    letters = tuple(str(x).upper() for x in facts.get("valid_letters") or choices or DEFAULT_LETTERS)
    text = response.rpartition(END_OF_REASONING)[2]
    correct = _correct_letter(label, facts, letters, choices)
    chosen = extract_letter(text, letters)
    if chosen is not None and correct is not None:
        return float(chosen == correct)
    answers = [facts.get("correct_answer"), facts.get("answer_text"), choices.get(correct or ""), label]
    return float(any(_contains(text, str(a)) for a in answers if a is not None and not isinstance(a, int)))


def extract_letter(text: str, letters: Sequence[str]) -> str | None:
    """The letter of the last statement such as "the answer is C", else the last valid capital that stands alone."""
    for pattern in STATEMENTS:
        stated = [m.upper() for m in re.findall(pattern, text) if m.upper() in letters]
        if stated:
            return stated[-1]
    alone = [m for m in re.findall(r"\b([A-Z])\b", text) if m in letters]
    return alone[-1] if alone else None


def _choices_by_letter(choices: Any) -> dict[str, str]:
    if isinstance(choices, Mapping):
        return {str(letter).upper(): str(text) for letter, text in choices.items()}
    return {letter: str(text) for letter, text in zip(string.ascii_uppercase, choices or [], strict=False)}


def _correct_letter(
    label: object, facts: Mapping[str, Any], letters: Sequence[str], choices: Mapping[str, str]
) -> str | None:
    if facts.get("correct_letter"):
        return str(facts["correct_letter"]).strip().upper()
    if isinstance(label, int) and not isinstance(label, bool):
        return letters[label] if 0 <= label < len(letters) else None
    for candidate in (label, facts.get("correct_answer"), facts.get("answer_text")):
        text = str(candidate or "").strip()
        if text.upper() in letters:
            return text.upper()
        for letter, choice in choices.items():
            if text and _words(choice) == _words(text):
                return letter
    return None


def _words(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s]", " ", text.lower()).split())


def _contains(text: str, answer: str) -> bool:
    needle = _words(answer)
    return bool(needle) and f" {needle} " in f" {_words(text)} "
