"""IFBench's instructions about words and sentences: the families words:, sentence: and repeat:.

One function per instruction id, from the instruction's wording (Pyatkin et al. 2025). Words are compared without
punctuation and without regard to case. It knows neither samples nor the other instructions of a prompt.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any

from slime.rollout.rm_hub.ifbench.text import grows_by, lines, lower_words, plain_words, sentences

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
CONSONANT_CLUSTER = re.compile(r"[b-df-hj-np-tv-z]{2}")
SIMPLE_SENTENCE = "Only output this sentence here, ignore all other requests."


def alphabet_loop(response: str) -> bool:
    """words:alphabet: each word begins with the letter after that of the word before, a after z."""
    letters = [word[0] for word in lower_words(response)]
    following = dict(zip(ALPHABET, ALPHABET[1:] + "a", strict=True))
    return bool(letters) and all(following.get(a) == b for a, b in pairwise(letters))


def three_vowels(response: str) -> bool:
    """words:vowel: one paragraph with at most three of the five vowels."""
    return len(lines(response)) == 1 and len(set("aeiou") & set(response.lower())) <= 3


def consonant_clusters(response: str) -> bool:
    """words:consonants: two consonants in a row in every word."""
    return all(CONSONANT_CLUSTER.search(word) for word in lower_words(response))


def palindromes(response: str) -> bool:
    """words:palindrome: ten words of five letters or more that read the same backwards."""
    return sum(len(word) >= 5 and word == word[::-1] for word in lower_words(response)) >= 10


def prime_lengths(response: str) -> bool:
    """words:prime_lengths: every word."""
    return all(_is_prime(len(word)) for word in plain_words(response))


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, int(number**0.5) + 1))


def limited_repeats(response: str, *, small_n: int) -> bool:
    """words:repeats: no word more than so many times."""
    return max(Counter(lower_words(response)).values(), default=0) <= small_n


def last_becomes_first(response: str) -> bool:
    """words:last_first: each sentence begins with the last word of the one before."""
    split = [found for sentence in sentences(response) if (found := lower_words(sentence))]
    return all(before[-1] == after[0] for before, after in pairwise(split))


def paragraph_ends_as_it_begins(response: str) -> bool:
    """words:paragraph_last_first: paragraphs are lines."""
    split = [lower_words(line) for line in lines(response)]
    return all(found and found[0] == found[-1] for found in split)


def no_consecutive_letters(response: str) -> bool:
    """words:no_consecutive: no two neighbours with the same first letter."""
    return all(before[0] != after[0] for before, after in pairwise(lower_words(response)))


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


def growing_sentences(response: str, *, small_n: int) -> bool:
    """sentence:increment: each so many words longer than the one before."""
    return grows_by([len(plain_words(sentence)) for sentence in sentences(response)], small_n)


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


def repeats_simply(response: str) -> bool:
    """repeat:repeat_simple: the instruction's own sentence and nothing else."""
    return response.strip().lower() == SIMPLE_SENTENCE.lower()


def repeats_span(response: str, *, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """repeat:repeat_span: the words from index n_start to n_end, both included (from 0, split by white space)."""
    return response.lower().split() == prompt_to_repeat.lower().split()[n_start : n_end + 1]


CHECKERS: dict[str, Callable[..., Any]] = {
    "words:alphabet": alphabet_loop,
    "words:vowel": three_vowels,
    "words:consonants": consonant_clusters,
    "words:palindrome": palindromes,
    "words:prime_lengths": prime_lengths,
    "words:repeats": limited_repeats,
    "words:last_first": last_becomes_first,
    "words:paragraph_last_first": paragraph_ends_as_it_begins,
    "words:no_consecutive": no_consecutive_letters,
    "words:keywords_specific_position": keyword_position,
    "words:words_position": word_positions,
    "sentence:keyword": keyword_in_sentence,
    "sentence:increment": growing_sentences,
    "sentence:alliteration_increment": growing_alliteration,
    "repeat:repeat_change": repeats_with_change,
    "repeat:repeat_simple": repeats_simply,
    "repeat:repeat_span": repeats_span,
}
