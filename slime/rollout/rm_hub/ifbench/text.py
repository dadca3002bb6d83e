"""Words, sentences and paragraphs of a response, as the instruction checks count them.

Plain regular expressions: a sentence ends with . ! or ? (and closing quotes) before white space, unless the word
before is a known abbreviation or a single initial. The closed lists of English words are here, too.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A full stop after these ends no sentence; after the second kind it does when a capital follows.
ABBREVIATIONS = _set("mr mrs ms dr prof sr jr st vs e.g i.e u.s u.k fig vol approx")
CLOSING_ABBREVIATIONS = _set("etc inc ltd co corp dept est al a.m p.m")

CONJUNCTIONS = _set("and but for nor or so yet")

# Title case may leave these small.
MINOR_WORDS = _set(
    "a an the and but or nor for so yet as at by in of off on per to up via from into like near onto over past than "
    "upon with is"
)

PERSON_NAMES = _set(
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin "
    "Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria "
    "Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella "
    "Jonathan"
)

# Verbs that a response may begin with, in the form of a command; other forms are made of them.
VERBS = _set(
    "accept add adjust allow analyze answer apply arrange ask avoid bake balance be become begin believe boil break "
    "breathe bring build buy calculate call carry celebrate change check choose clean click close collect combine "
    "come compare complete connect consider continue convert cook count create cut decide define describe design "
    "determine develop discover discuss do draw dream drink drive eat embrace embark encourage enjoy ensure enter "
    "establish evaluate examine expect explain explore express feel fill find finish fly focus fold follow forget "
    "form gather generate get give go grab grow guess have hear help hold identify imagine implement improve include "
    "increase introduce invest join jump keep know lead learn leave let list listen live look love maintain make "
    "manage meet mix move need note observe offer open organize paint pay pick picture place plan plant play pour "
    "practice prepare present press prioritize produce protect provide pull push put read reduce reflect release "
    "remember remove repeat replace respond rest return review rise run save say search see select sell send separate "
    "serve set share show sing sit sleep solve speak spend stand start stay step stop store study suppose swim switch "
    "take talk teach tell test think transform travel treat trust try turn understand unlock use visit wait wake walk "
    "want wash watch wear welcome win work write "
)

PRONOUNS = _set(
    "i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers "
    "herself it its itself they them their theirs themselves"
)

STOP_WORDS = _set(
    "i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers herself "
    "it its itself they them their theirs themselves what which who whom this that these those am is are was were be "
    "been being have has had having do does did doing a an the and but if or because as until while of at by for with "
    "about against between into through during before after above below to from up down in out on off over under "
    "again further then once here there when where why how all any both each few more most other some such no nor not "
    "only own same so than too very s t can will just don should now"
)

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


def num_syllables(word: str) -> int:
    """About as many syllables as a lower-case word has: groups of vowels, without a silent e at the end."""
    groups = len(re.findall(r"[aeiouy]+", word))
    is_silent = groups > 1 and word.endswith("e") and not word.endswith("ee") and not re.search(r"[^aeiouy]le$", word)
    return max(1, groups - is_silent)


def is_verb(word: str) -> bool:
    """Whether a lower-case word is one of `VERBS`, or that with s, es, d, ed or ing at its end."""
    stems = [word.removesuffix(end) for end in ("", "s", "es", "d", "ed", "ing") if word.endswith(end)]
    doubled = [stem[:-1] for stem in stems if len(stem) > 2 and stem[-1] == stem[-2]]
    return any(stem in VERBS or f"{stem}e" in VERBS for stem in [*stems, *doubled])
