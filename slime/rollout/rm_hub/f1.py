"""Token F1 between two texts, as SQuAD defines it. It knows only two strings."""

from __future__ import annotations

import re
import string
from collections import Counter

CLOSED_ANSWERS = ("yes", "no", "noanswer")


def normalize_answer(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text).split())


def f1_score(prediction: str | None, ground_truth: str | None) -> tuple[float, float, float]:
    """(F1, precision, recall) over tokens; yes, no and noanswer count only as a whole, and None as nothing.

    Example:
        >>> f1_score("the brown fox", "a quick brown fox")[0]
        0.8
    """
    nothing = (0.0, 0.0, 0.0)
    if prediction is None or ground_truth is None:
        return nothing
    given, truth = normalize_answer(prediction), normalize_answer(ground_truth)
    if given != truth and (given in CLOSED_ANSWERS or truth in CLOSED_ANSWERS):
        return nothing
    given_tokens, truth_tokens = given.split(), truth.split()
    common = sum((Counter(given_tokens) & Counter(truth_tokens)).values())
    if common == 0:
        return nothing
    precision, recall = common / len(given_tokens), common / len(truth_tokens)
    return 2 * precision * recall / (precision + recall), precision, recall
