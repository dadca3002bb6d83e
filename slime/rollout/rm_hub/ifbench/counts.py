"""IFBench's instructions that count something: the families count: and ratio:.

One function per instruction id, from the instruction's wording (Pyatkin et al. 2025, "Generalizing Verifiable
Instruction Following"). It knows neither samples nor the other instructions of a prompt.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from slime.rollout.rm_hub.ifbench.text import end_mark, lower_words, plain_words, sentences, words
from slime.rollout.rm_hub.ifbench.word_lists import CONJUNCTIONS, PERSON_NAMES, PRONOUNS, STOP_WORDS

INTERROBANGS = ("?!", "!?", "‽")
JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
KEYWORD_COUNTS = (1, 2, 3, 5, 7)


def word_count_range(response: str, *, min_words: int, max_words: int) -> bool:
    """count:word_count_range."""
    return min_words <= len(words(response)) <= max_words


def unique_words(response: str, *, N: int) -> bool:
    """count:unique_word_count: at least N."""
    return len(set(lower_words(response))) >= N


def conjunctions(response: str, *, small_n: int) -> bool:
    """count:conjunctions: at least so many different coordinating ones."""
    return len(CONJUNCTIONS & set(lower_words(response))) >= small_n


def person_names(response: str, *, N: int) -> bool:
    """count:person_names: at least N different ones of the instruction's list."""
    return len(PERSON_NAMES & set(re.findall(r"[A-Za-z]+", response))) >= N


def numbers(response: str, *, N: int) -> bool:
    """count:numbers: exactly N; 1,000 and 3.5 are one number each."""
    return sum(word.isdigit() for word in plain_words(response)) == N


def pronouns(response: str, *, N: int) -> bool:
    """count:pronouns: at least N."""
    return sum(word in PRONOUNS for word in re.findall(r"[a-z]+", response.lower())) >= N


def punctuation(response: str) -> bool:
    """count:punctuation: each of . , ! ? ; : and an interrobang besides."""
    mark = next((mark for mark in INTERROBANGS if mark in response), None)
    return mark is not None and set(".,!?;:") <= set(response.replace(mark, "", 1))


def nth_word_japanese(response: str, *, N: int) -> bool:
    """count:words_japanese: every N-th word, numbers excepted."""
    every = response.split()[N - 1 :: N]
    return bool(every) and all(JAPANESE.search(word) or word.strip(".,!?;:").isdigit() for word in every)


def keywords_multiple(
    response: str, *, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str
) -> bool:
    """count:keywords_multiple: keyword1 to keyword5 exactly 1, 2, 3, 5 and 7 times."""
    text = response.lower()
    ordered = (keyword1, keyword2, keyword3, keyword4, keyword5)
    return all(text.count(word.lower()) == count for word, count in zip(ordered, KEYWORD_COUNTS, strict=True))


def stop_words(response: str, *, percentage: float) -> bool:
    """ratio:stop_words: at most so many percent of the words."""
    every = re.findall(r"[a-z]+", response.lower())
    return bool(every) and 100 * sum(word in STOP_WORDS for word in every) <= percentage * len(every)


def sentence_types(response: str) -> bool:
    """ratio:sentence_type: two declarative sentences to one interrogative."""
    marks = Counter(map(end_mark, sentences(response)))
    return marks["?"] > 0 and marks["."] == 2 * marks["?"]


def sentence_balance(response: str) -> bool:
    """ratio:sentence_balance: as many declarative as interrogative as exclamatory sentences."""
    marks = Counter(map(end_mark, sentences(response)))
    return marks["."] == marks["?"] == marks["!"] > 0


def three_equal_sentences(response: str) -> bool:
    """ratio:sentence_words: three sentences of the same number of characters, no word twice."""
    found = sentences(response)
    every = lower_words(response)
    return len(found) == 3 and len(set(map(len, found))) == 1 and len(set(every)) == len(every)


CHECKERS: dict[str, Callable[..., Any]] = {
    "count:word_count_range": word_count_range,
    "count:unique_word_count": unique_words,
    "count:conjunctions": conjunctions,
    "count:person_names": person_names,
    "count:numbers": numbers,
    "count:pronouns": pronouns,
    "count:punctuation": punctuation,
    "count:words_japanese": nth_word_japanese,
    "count:keywords_multiple": keywords_multiple,
    "ratio:stop_words": stop_words,
    "ratio:sentence_type": sentence_types,
    "ratio:sentence_balance": sentence_balance,
    "ratio:sentence_words": three_equal_sentences,
}
