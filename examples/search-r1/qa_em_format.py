"""Exact-match rewards of question answering, as Search-R1 defines them.

The text that is scored is prompt and response together. Its prompt shows one example answer, so an answer of the
model is the second `<answer>` block or a later one.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping
from typing import Any

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_INFORMATION = re.compile(r"<information>(.*?)</information>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_BLOCK = r"\s*<{0}>(?:(?!</?(?:think|search|information|answer)>).)*</{0}>\s*"
_THINK, _SEARCH, _FOUND, _LAST = (_BLOCK.format(tag) for tag in ("think", "search", "information", "answer"))
_VALID = re.compile(rf"{_THINK}(?:{_SEARCH}{_FOUND}{_THINK})*{_LAST}", re.DOTALL)
_START = "<|im_start|>assistant"


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation and articles, with single spaces."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def em_check(prediction: str, golden_answers: str | Iterable[str]) -> bool:
    """Whether the prediction is one of the answers, once both are normalised."""
    answers = [golden_answers] if isinstance(golden_answers, str) else golden_answers
    return normalize_answer(prediction) in {normalize_answer(answer) for answer in answers}


def extract_solution(solution_str: str) -> str | None:
    """The last answer; None with less than two answer blocks, for the first one is the prompt's example."""
    answers = _ANSWER.findall(solution_str)
    return answers[-1].strip() if len(answers) > 1 else None


def is_valid_sequence(text: str) -> tuple[bool, str]:
    """Whether what follows `<|im_start|>assistant` is think, (search, information, think)*, answer, nothing between.

    Returns:
        (it is, the reason in words).
    """
    _, start, written = text.rpartition(_START)
    if not start:
        return False, "no assistant turn"
    ended = written.replace("<|im_end|>", "").replace("<|endoftext|>", "")
    if _VALID.fullmatch(ended):
        return True, "valid"
    return False, "not think, (search, information, think)*, answer"


def is_retrieval_correct(text: str, golden_answers: str | Iterable[str]) -> bool:
    """Whether an information block has one of the answers in it."""
    answers = [golden_answers] if isinstance(golden_answers, str) else list(golden_answers)
    found = [normalize_answer(block) for block in _INFORMATION.findall(text)]
    return any(normalize_answer(answer) in block for block in found for answer in answers)


def compute_score_em(
    solution_str: str,
    ground_truth: Mapping[str, Any],
    method: str = "strict",
    structure_format_score: float = 0,
    final_format_score: float = 0,
    retrieval_score: float = 0,
    format_score: float = 0,
    score: float = 1.0,
) -> float:
    """The reward of a conversation.

    Args:
        solution_str: prompt and response.
        ground_truth: `{"target": answer or answers}`.
        method: has no effect; as `format_score`, it is there for callers that name it.
        structure_format_score: of a wrong answer in a valid form, and what a right one in an invalid form loses.
        final_format_score: of a wrong answer in an invalid form.
        retrieval_score: added to `structure_format_score` where a target was found by a search.
        score: of a right answer in a valid form.
    """
    is_valid, _ = is_valid_sequence(solution_str)
    target, answer = ground_truth["target"], extract_solution(solution_str)
    if answer is not None and em_check(answer, target):
        return score if is_valid else score - structure_format_score
    if is_valid:
        found = is_retrieval_correct(solution_str, target)
        return structure_format_score + (retrieval_score if found else 0)
    return 0.0 if answer is None else final_format_score
