"""Words, sentences and paragraphs of a response, and IFBench's instructions about them: the families count:, ratio:,
words:, sentence: and repeat:.

A sentence ends with . ! or ? (and closing quotes) before white space, unless the word before is a known abbreviation
or a single initial. The closed lists of English words are here, too.

There is a row for each instruction id, from the instruction's wording (Pyatkin et al. 2025, "Generalizing Verifiable
Instruction Following"). Words are compared without punctuation and without regard to case. The original tags words
with NLTK and counts syllables with a dictionary; here a list of verbs and groups of vowels stand for both.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import Any


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
