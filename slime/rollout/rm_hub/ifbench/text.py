"""Words, sentences and paragraphs of a response, as the instruction checks count them.

Plain regular expressions: a sentence ends with . ! or ? (and closing quotes) before white space, unless the word
before is a known abbreviation or a single initial. It knows no instruction.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from slime.rollout.rm_hub.ifbench.word_lists import ABBREVIATIONS, CLOSING_ABBREVIATIONS

SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"'”’)\]]*+(?=\s|$)")
_NEXT_CHARACTER = re.compile(r"\s*(\S?)")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation + "“”‘’…")
RELATIONS = ("at least", "less than")


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores: what "number of words" counts."""
    return re.findall(r"\w+", text)


def plain_words(text: str) -> list[str]:
    """Words between white space without any punctuation ("don't" is dont); what is left empty is no word."""
    return [word for word in (part.translate(_WITHOUT_PUNCTUATION) for part in text.split()) if word]


def lower_words(text: str) -> list[str]:
    """As `plain_words`, in lower case."""
    return plain_words(text.lower())


def sentences(text: str) -> list[str]:
    """The sentences in order, each with its end mark; a last piece without one counts, a line break alone does not."""
    found, start, after_mark = [], 0, 0
    for end in SENTENCE_END.finditer(text):
        before, after_mark = text[after_mark : end.start()], end.end()
        if end.group()[:2] == "." and _is_abbreviation(before, character_at(text, after_mark)):
            continue
        found.append(text[start : end.end()].strip())
        start = end.end()
    rest = text[start:].strip()
    return [sentence for sentence in (*found, rest) if sentence]


def character_at(text: str, position: int) -> str:
    """The first character from a position on that is no white space, "" at the end."""
    following = _NEXT_CHARACTER.match(text, position)
    return following[1] if following else ""


def _is_abbreviation(before: str, following: str) -> bool:
    word = before.split()[-1].lstrip("(\"'“‘[") if before.split() else ""
    is_initial = len(word) == 1 and word.isupper() and word != "I"
    word = word.lower()
    return is_initial or word in ABBREVIATIONS or (word in CLOSING_ABBREVIATIONS and not following.isupper())


def lines(text: str) -> list[str]:
    """The lines that are not blank."""
    return [line for line in text.splitlines() if line.strip()]


def end_mark(sentence: str) -> str:
    """The last of . ! ? that ends a sentence, "" without one."""
    text = sentence.rstrip("\"'”’)] \n\t")
    return text[-1] if text and text[-1] in ".!?" else ""


def compares(count: int, relation: str, threshold: int) -> bool:
    """Whether a count is "at least" or "less than" a threshold.

    Raises:
        ValueError: another relation.
    """
    if relation not in RELATIONS:
        raise ValueError(f"the relation {relation!r} must be one of {', '.join(map(repr, RELATIONS))}")
    return count >= threshold if relation == "at least" else count < threshold


def grows_by(values: Sequence[int], step: int) -> bool:
    """Whether each value is `step` more than the one before."""
    return all(after - before == step for before, after in zip(values, values[1:], strict=False))
