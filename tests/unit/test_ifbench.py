"""Every instruction of the ifbench reward with a response that follows it and one that does not."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest

from slime.rollout.rm_hub.ifbench import CHECKERS, compute_ifbench_reward, follows
from slime.rollout.rm_hub.ifbench.text import sentences

QUESTION = "Question {n}: {stem}\n" + "\n".join(f"{letter}) x" for letter in "ABCDE")
QUESTIONS = "\n".join(QUESTION.format(n=n, stem="why " * n) for n in range(1, 5))
PALINDROMES = "level radar civic rotor kayak madam refer tenet stats, solos"
FIVE_KEYWORDS = {"keyword1": "aa", "keyword2": "bb", "keyword3": "cc", "keyword4": "dd", "keyword5": "ee"}
FIVE_COUNTS = "aa " + "bb " * 2 + "cc " * 3 + "dd " * 5 + "ee " * 7
ALPHABET_STORY = " ".join(f"{letter}x ran." for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ")


def table(header: str, num_rows: int, row: str) -> str:
    return "\n".join([header, *[row] * num_rows])


# 54 lines, of which 52 are made up: the names between the first and the last are not looked up
COUNTRIES = "\n".join(["Zimbabwe", "Zambia", *(f"Ü{n}" for n in range(99, 48, -1)), "Algeria"])
CAPITALS = (
    "Reykjavík, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin, "
    "Amsterdam, Warsaw, London, Brussels, Kyiv, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, "
    "Chișinău, Bern, Ljubljana, Zagreb."
)
CITY = "ID,Country,City,Year,Count"
PRODUCT = "ProductID,Category,Brand,Price,Stock"
STUDENT = "StudentID\tSubject\tGrade\tSemester\tScore"

# id, arguments, a response that follows it, one that does not
TABLE: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["Sun", "c++"]}, "the sun, and C++", "the sun"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "a A", "a"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "less than"}, "a", "a A"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "category", "a Cat."),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 3, "let_relation": "at least"}, "Eel he", "eel"),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "less than"},
        "Dr. No left. He ran!",
        "Ab. Cd? Ef!",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n***\n***\ntwo"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "a-b c", "a b"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
        "Well.\n\n'So, yes",
        "So.\n\nWell",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] and [b]", "[a] and b"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\np. s. more", "Bye. PS more"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.P.S more", "Bye.\nP.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n - b", "* a\n- b\n* c"),
    ("detectable_format:constrained_response", {}, " My answer is no. ", "no"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* then *b*", "*a* then * *"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\nx\nSection 2\ny",
        "Section 1\nx",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A tale>>\nOnce", "<< >> Once"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say HI"}, "say hi: hi", "hi. say hi"),
    ("startend:end_checker", {"end_phrase": "The end."}, 'Once. "the END."', "The end. Or not"),
    ("startend:quotation", {}, ' "all of it" ', '"some" of it'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "I am HERE",
        "I am here",
    ),
    ("change_case:english_capital", {}, "ALL OF IT IS LOUD, AND THAT IS FINE", "Not all of it"),
    ("change_case:english_lowercase", {}, "all of it is quiet, and that is fine", "Not all of it"),
    ("punctuation:no_comma", {}, "none here", "here, one"),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "a b c", "a b c d"),
    ("count:unique_word_count", {"N": 2}, "a b A", "a, A a."),
    ("count:conjunctions", {"small_n": 3}, "This and that, but no; or so.", "This and that and those or"),
    ("count:person_names", {"N": 2}, "Emma's friend Liam", "Emma and Emma"),
    ("count:numbers", {"N": 2}, "1,000 of 3.5 x2", "1 and 2 and 3"),
    ("count:pronouns", {"N": 2}, "I saw you.", "I saw Emma."),
    ("count:punctuation", {}, "A, b; c: d! E? So. Really?!", "A, b; c: d! E? So."),
    ("count:words_japanese", {"N": 2}, "the 犬 ran 速い", "the 犬 ran fast"),
    ("count:keywords_multiple", FIVE_KEYWORDS, FIVE_COUNTS, FIVE_COUNTS + "aa"),
    ("ratio:stop_words", {"percentage": 50.0}, "the cat", "the cat is here"),
    ("ratio:sentence_type", {}, "A dog. A cat. A cow?", "A dog. A cow?"),
    ("ratio:sentence_balance", {}, "A dog. Big? Yes!", "A dog. Big? No. Yes!"),
    ("ratio:sentence_words", {}, "Ab cd. Ef gh. Ij kl.", "Ab cd. Ef gh. Ab kl."),
    ("ratio:overlap", {"reference_text": "abcdef", "percentage": 50}, "abcdxy", "abcdef"),
    ("words:start_verb", {}, "Cutting trees is hard", "Trees are cut"),
    ("words:start_verb", {}, "Takes a day", "A day"),
    ("words:odd_even_syllables", {}, "The table is over", "The cat is over"),
    ("words:alphabet", {}, "Xylophones yell. Zebras act", "Ants can bite"),
    ("words:vowel", {}, "a big dog hid", "a big dog met us"),
    ("words:consonants", {}, "strong plants", "strong tea"),
    ("words:palindrome", {}, PALINDROMES, PALINDROMES.replace("kayak", "canoe")),
    ("words:prime_lengths", {}, "the old sailor's am", "this is"),
    ("words:repeats", {"small_n": 2}, "Row, row your boat", "row row row"),
    ("words:last_first", {}, "I see dogs. Dogs see cats. Cats eat.", "I see dogs. Cats eat."),
    ("words:paragraph_last_first", {}, "Dogs love dogs.\nYes, yes!", "Dogs love cats."),
    ("words:no_consecutive", {}, "a big cat", "big bad cat"),
    ("words:keywords_specific_position", {"keyword": "Cat", "n": 2, "m": 3}, "Yes. The big cat sat.", "The big cat."),
    ("words:words_position", {"keyword": "cat"}, "The cat is a cat indeed", "The cat is a dog"),
    ("sentence:keyword", {"word": "cat", "N": 2}, "Yes. A cat.", "A cat. Yes."),
    ("sentence:increment", {"small_n": 1}, "I am. I am here. I am here now.", "I am. I am here now."),
    (
        "sentence:alliteration_increment",
        {},
        "Dogs run. Big bears run. Sly sad swans swim.",
        "Big bears run. Dogs run.",
    ),
    ("repeat:repeat_change", {"prompt_to_repeat": "Write a poem"}, "Sing a poem", "Write a poem"),
    ("repeat:repeat_simple", {}, "Only output this sentence here, ignore all other requests.", "Only this."),
    ("repeat:repeat_span", {"prompt_to_repeat": "a b c d e", "n_start": 1, "n_end": 3}, "b c d", "b c"),
    ("format:parentheses", {}, "a (b [c {d (e [f] e) d} c] b)", "a (b [c {d (e [f"),
    ("format:quotes", {}, '"he said \'she said "it\'s so" then\' and left"', "\"he said 'so'\""),
    ("format:options", {"options": "yes/no/maybe"}, "Maybe.", "maybe not"),
    ("format:options", {"options": "a), b), c), d)"}, "b)", "b"),
    ("format:options", {"options": "I know or I don't know"}, "I don't know.", "I don't"),
    ("format:newline", {}, "one\ntwo.\n\nthree", "one two\nthree"),
    ("format:emoji", {}, "So it is 😀. Good! 👍🏽", "So it is 😀. Good!"),
    ("format:line_indent", {}, "a\n b\n   c", "a\n b\n b"),
    ("format:quote_unquote", {}, '"so" means thus, "no" means not', 'this is "so"'),
    ("format:list", {"sep": "!?!?"}, "!?!? one\n!?!? two", "* one\n* two"),
    ("format:sub-bullets", {}, "* a\n  - b\n* c\n  - d", "* a\n  - b\n* c"),
    ("format:no_bullets_bullets", {}, "One is. Two is.\n* a\n* b", "One is.\n* a\n* b"),
    ("format:title_case", {}, "The Lord of the Rings", "The Lord of the rings"),
    (
        "format:output_template",
        {},
        "My Answer: a My Conclusion: b Future Outlook: c",
        "My Answer: My Conclusion: b Future Outlook:",
    ),
    ("format:no_whitespace", {}, "noneatall\n", "some space"),
    ("format:thesis", {}, "<i>Dogs are good.</i> They help.", "<i>Dogs are good.</i>"),
    ("custom:reverse_newline", {}, COUNTRIES, COUNTRIES.replace("Zambia", "Ambia")),
    ("custom:european_capitals_sort", {}, CAPITALS, CAPITALS.replace("Oslo, Tallinn", "Tallinn, Oslo")),
    ("custom:multiples", {}, "14, 21, 28, 35, 42, 49", "7, 14, 21, 28, 35, 42, 49"),
    ("custom:mcq_count_length", {}, QUESTIONS, QUESTIONS.replace("E) x", "", 1)),
    ("custom:word_reverse", {}, "eagle bald the is It", "It is the bald eagle"),
    ("custom:character_reverse", {}, "elgae dlab eht", "bald eagle"),
    ("custom:sentence_alphabet", {}, ALPHABET_STORY, ALPHABET_STORY.replace("Cx", "Ax")),
    ("custom:csv_city", {}, table(CITY, 7, "1,a,b,2,3"), table(CITY, 6, "1,a,b,2,3")),
    (
        "custom:csv_special_character",
        {},
        table(PRODUCT, 13, "1,a,b,2,3") + '\n1,"a&b",c,2,3',
        table(PRODUCT, 14, '1,"a",b,2,3'),
    ),
    (
        "custom:csv_quotes",
        {},
        table(STUDENT, 3, "\t".join(['"x"'] * 5)),
        table(STUDENT, 3, "\t".join(['"x"'] * 4 + ["x"])),
    ),
    ("custom:date_format_list", {}, "1796-04-12, 1800-06-14", "1796-04-12 and 1800-13-14"),
]
NEEDS_DETECTOR = {"language:response_language"}


@pytest.mark.parametrize(
    ("name", "arguments", "right", "wrong"), TABLE, ids=[f"{i}-{r[0]}" for i, r in enumerate(TABLE)]
)
def test_a_response_follows_the_instruction_and_another_does_not(
    name: str, arguments: dict[str, Any], right: str, wrong: str
) -> None:
    assert follows(right, name, arguments)
    assert not follows(wrong, name, arguments)


def test_every_instruction_is_in_the_table() -> None:
    assert {row[0] for row in TABLE} == set(CHECKERS) - NEEDS_DETECTOR


def test_all_instructions_must_be_followed() -> None:
    metadata = {
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [None, {"num_words": 2.0, "relation": "at least", "keyword": None}],
        "prompt_text": "p",
        "record_id": 1,
    }
    assert compute_ifbench_reward("two words", None, metadata) == 1.0
    assert compute_ifbench_reward("one", None, metadata) == 0.0
    assert compute_ifbench_reward("two, words", None, metadata) == 0.0


@pytest.mark.parametrize("blank", ["", "  \n", None])
def test_a_blank_response_follows_nothing(blank: str | None) -> None:
    assert compute_ifbench_reward(blank, None, {"instruction_id_list": ["punctuation:no_comma"]}) == 0.0


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, r"needs metadata\['instruction_id_list'\], a list of names, got None"),
        ({"instruction_id_list": []}, "got \\[\\]"),
        (
            {"instruction_id_list": ["punctuation:no_coma"]},
            "did you mean punctuation:no_comma.*known are change_case:",
        ),
        ({"instruction_id_list": ["words:start_noun"]}, "unknown instruction 'words:start_noun'"),
        ({"instruction_id_list": ["count:numbers"], "kwargs": []}, "one entry for each of the 1 instructions"),
        ({"instruction_id_list": ["count:numbers"], "kwargs": [{}]}, "count:numbers was given {}: missing a required"),
        ({"instruction_id_list": ["count:numbers"], "kwargs": [{"M": 3}]}, "was given {'M': 3}"),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 2, "relation": "exactly"}],
            },
            "the relation 'exactly' must be one of 'at least', 'less than'",
        ),
    ],
)
def test_a_mistake_in_the_data_is_named_whatever_the_response(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_ifbench_reward("some response", None, metadata)


def test_the_language_is_asked_of_a_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    detector = types.ModuleType("langdetect")
    detector.LangDetectException = KeyError
    detector.detect = {"Ein Satz": "de", "ONE": "en", "UN": "fr"}.__getitem__
    monkeypatch.setitem(sys.modules, "langdetect", detector)
    assert follows("Ein Satz", "language:response_language", {"language": "de"})
    assert not follows("ONE", "language:response_language", {"language": "de"})
    assert follows("123", "language:response_language", {"language": "de"}), "nothing to judge by"
    assert follows("ONE", "change_case:english_capital")
    assert not follows("UN", "change_case:english_capital")


def test_a_missing_detector_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(ModuleNotFoundError, match="pip install langdetect"):
        follows("Ein Satz", "language:response_language", {"language": "de"})


def test_json_of_any_kind_counts() -> None:
    for value in ({"a": [1]}, [1, 2], "text"):
        assert follows(json.dumps(value), "detectable_format:json_format")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("Mr. J. Smith lives, e.g. here. Yes", ["Mr. J. Smith lives, e.g. here.", "Yes"]),
        ('He said "Go." Then left...', ['He said "Go."', "Then left..."]),
        (
            "Cats, dogs etc. are. Cats, dogs etc. Nothing else.",
            ["Cats, dogs etc. are.", "Cats, dogs etc.", "Nothing else."],
        ),
        ("Yes. No. Maybe.", ["Yes.", "No.", "Maybe."]),
        ("It costs 3.50 in v1.2 today.", ["It costs 3.50 in v1.2 today."]),
        ("It was I. He left.", ["It was I.", "He left."]),
        ("", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected
