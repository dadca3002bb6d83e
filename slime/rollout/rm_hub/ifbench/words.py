"""IFBench's instructions about words and sentences: the families count:, ratio:, words:, sentence: and repeat:.

A row for each instruction id, from the instruction's wording (Pyatkin et al. 2025, "Generalizing Verifiable
Instruction Following"). Words are compared without punctuation and without regard to case. The original tags words
with NLTK and counts syllables with a dictionary; here a list of verbs and groups of vowels stand for both.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any

from slime.rollout.rm_hub.ifbench.text import (
    CONJUNCTIONS,
    PERSON_NAMES,
    PRONOUNS,
    STOP_WORDS,
    end_mark,
    grows_by,
    is_verb,
    lines,
    lower_words,
    num_syllables,
    plain_words,
    sentences,
    words,
)

INTERROBANGS = ("?!", "!?", "‽")
JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
KEYWORD_COUNTS = (1, 2, 3, 5, 7)
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
CONSONANT_CLUSTER = re.compile(r"[b-df-hj-np-tv-z]{2}")
SIMPLE_SENTENCE = "Only output this sentence here, ignore all other requests."


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


def alphabet_loop(response: str) -> bool:
    """words:alphabet: each word begins with the letter after that of the word before, a after z."""
    letters = [word[0] for word in lower_words(response)]
    following = dict(zip(ALPHABET, ALPHABET[1:] + "a", strict=True))
    return bool(letters) and all(following.get(a) == b for a, b in pairwise(letters))


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, int(number**0.5) + 1))


def last_becomes_first(response: str) -> bool:
    """words:last_first: each sentence begins with the last word of the one before."""
    split = [found for sentence in sentences(response) if (found := lower_words(sentence))]
    return all(before[-1] == after[0] for before, after in pairwise(split))


def paragraph_ends_as_it_begins(response: str) -> bool:
    """words:paragraph_last_first: paragraphs are lines."""
    split = [lower_words(line) for line in lines(response)]
    return all(found and found[0] == found[-1] for found in split)


def keyword_position(response: str, *, keyword: str, n: int, m: int) -> bool:
    """words:keywords_specific_position: the m-th word of the n-th sentence."""
    found = sentences(response)
    split = lower_words(found[n - 1]) if 1 <= n <= len(found) else []
    return 1 <= m <= len(split) and [split[m - 1]] == lower_words(keyword)


def word_positions(response: str, *, keyword: str) -> bool:
    """words:words_position: the second and the second to last word."""
    found = lower_words(response)
    return len(found) >= 2 and [found[1]] == [found[-2]] == lower_words(keyword)


def keyword_in_sentence(response: str, *, word: str, N: int) -> bool:
    """sentence:keyword: in the N-th sentence."""
    found = sentences(response)
    return 1 <= N <= len(found) and word.lower() in found[N - 1].lower()


def growing_alliteration(response: str) -> bool:
    """sentence:alliteration_increment: the longest run of words with one first letter grows from each to the next."""
    runs = [
        max((len(list(run)) for _, run in groupby(lower_words(sentence), lambda word: word[0])), default=0)
        for sentence in sentences(response)
    ]
    return all(before < after for before, after in pairwise(runs))


def repeats_with_change(response: str, *, prompt_to_repeat: str) -> bool:
    """repeat:repeat_change: the request with another first word."""
    given, wanted = response.split(), prompt_to_repeat.split()
    return bool(given and wanted) and given[0] != wanted[0] and given[1:] == wanted[1:]


def trigram_overlap(response: str, *, reference_text: str, percentage: float) -> bool:
    """ratio:overlap: so many percent of the response's runs of three characters are in a text, give or take two."""
    own, others = ({text[i : i + 3] for i in range(len(text) - 2)} for text in (response, reference_text))
    return bool(own) and abs(100 * len(own & others) / len(own) - percentage) <= 2


def odd_even_syllables(response: str) -> bool:
    """words:odd_even_syllables: words of an odd and of an even number of syllables in turn."""
    parities = [num_syllables(word) % 2 for word in lower_words(response)]
    return all(before != after for before, after in pairwise(parities))


CHECKERS: dict[str, Callable[..., Any]] = {
    "count:word_count_range": lambda response, *, min_words, max_words: min_words <= len(words(response)) <= max_words,
    # at least N
    "count:unique_word_count": lambda response, *, N: len(set(lower_words(response))) >= N,
    # at least so many different coordinating ones
    "count:conjunctions": lambda response, *, small_n: len(CONJUNCTIONS & set(lower_words(response))) >= small_n,
    # at least N different ones of the instruction's list
    "count:person_names": lambda response, *, N: len(PERSON_NAMES & set(re.findall(r"[A-Za-z]+", response))) >= N,
    # exactly N; 1,000 and 3.5 are one number each
    "count:numbers": lambda response, *, N: sum(word.isdigit() for word in plain_words(response)) == N,
    # at least N
    "count:pronouns": lambda response, *, N: (
        sum(word in PRONOUNS for word in re.findall(r"[a-z]+", response.lower())) >= N
    ),
    "count:punctuation": punctuation,
    "count:words_japanese": nth_word_japanese,
    "count:keywords_multiple": keywords_multiple,
    "ratio:stop_words": stop_words,
    "ratio:sentence_type": sentence_types,
    "ratio:sentence_balance": sentence_balance,
    "ratio:sentence_words": three_equal_sentences,
    "ratio:overlap": trigram_overlap,
    "words:odd_even_syllables": odd_even_syllables,
    # the first word
    "words:start_verb": lambda response: any(map(is_verb, lower_words(response)[:1])),
    "words:alphabet": alphabet_loop,
    # one paragraph with at most three of the five vowels
    "words:vowel": lambda response: len(lines(response)) == 1 and len(set("aeiou") & set(response.lower())) <= 3,
    # two consonants in a row in every word
    "words:consonants": lambda response: all(CONSONANT_CLUSTER.search(word) for word in lower_words(response)),
    # ten words of five letters or more that read the same backwards
    "words:palindrome": lambda response: (
        sum(len(word) >= 5 and word == word[::-1] for word in lower_words(response)) >= 10
    ),
    # every word
    "words:prime_lengths": lambda response: all(_is_prime(len(word)) for word in plain_words(response)),
    # no word more than so many times
    "words:repeats": lambda response, *, small_n: max(Counter(lower_words(response)).values(), default=0) <= small_n,
    "words:last_first": last_becomes_first,
    "words:paragraph_last_first": paragraph_ends_as_it_begins,
    # no two neighbours with the same first letter
    "words:no_consecutive": lambda response: all(
        before[0] != after[0] for before, after in pairwise(lower_words(response))
    ),
    "words:keywords_specific_position": keyword_position,
    "words:words_position": word_positions,
    "sentence:keyword": keyword_in_sentence,
    # each so many words longer than the one before
    "sentence:increment": lambda response, *, small_n: grows_by(
        [len(plain_words(sentence)) for sentence in sentences(response)], small_n
    ),
    "sentence:alliteration_increment": growing_alliteration,
    "repeat:repeat_change": repeats_with_change,
    # the instruction's own sentence and nothing else
    "repeat:repeat_simple": lambda response: response.strip().lower() == SIMPLE_SENTENCE.lower(),
    # the words from index n_start to n_end, both included (from 0, split by white space)
    "repeat:repeat_span": lambda response, *, prompt_to_repeat, n_start, n_end: (
        response.lower().split() == prompt_to_repeat.lower().split()[n_start : n_end + 1]
    ),
}
