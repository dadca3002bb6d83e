"""IFBench's instructions about the form of a response: the families format: and custom:.

A row for each instruction id, from the instruction's wording (Pyatkin et al. 2025).
"""

from __future__ import annotations

import csv
import re
import string
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from itertools import pairwise
from typing import Any

from slime.rollout.rm_hub.ifbench.text import (
    MINOR_WORDS,
    SENTENCE_END,
    character_at,
    end_mark,
    lines,
    lower_words,
    plain_words,
    sentences,
)

BRACKETS = {")": "(", "]": "[", "}": "{"}
CHOICE_LIST = re.compile(r"\W*a\W*b\W*c\b", re.IGNORECASE)
CAPITALS = [
    "reykjavik",
    "helsinki",
    "oslo",
    "tallinn",
    "stockholm",
    "riga",
    "moscow",
    "copenhagen",
    "vilnius",
    "minsk",
    "dublin",
    "berlin",
    "amsterdam",
    "warsaw",
    "london",
    "brussels",
    "kyiv",
    "prague",
    "luxembourg",
    "paris",
    "vienna",
    "bratislava",
    "budapest",
    "vaduz",
    "chisinau",
    "bern",
    "ljubljana",
    "zagreb",
]
CSV_CITY = ["ID", "Country", "City", "Year", "Count"]
CSV_PRODUCT = ["ProductID", "Category", "Brand", "Price", "Stock"]
CSV_STUDENT = ["StudentID", "Subject", "Grade", "Semester", "Score"]
# atomic groups: the first heading of a kind serves as well as any after it, so none of them is tried
TEMPLATE = re.compile(r"\s*My Answer:\s*\S(?>.*?My Conclusion:\s*\S)(?>.*?Future Outlook:\s*\S)", re.DOTALL)
SPECIAL = re.compile(r"[^\w\s]")
OPTION_LINE = re.compile(r"^\s*[(\[]?[A-Ea-e][).:\]]")


def nested_parentheses(response: str) -> bool:
    """format:parentheses: brackets of any kind, five levels deep and closed again."""
    open_brackets: list[str] = []
    deepest = 0
    for character in response:
        if character in BRACKETS.values():
            open_brackets.append(character)
            continue
        if character in BRACKETS and open_brackets and open_brackets[-1] == BRACKETS[character]:
            deepest = max(deepest, len(open_brackets))
            open_brackets.pop()
    return deepest >= 5


def nested_quotes(response: str) -> bool:
    """format:quotes: double and single quotes in turn, three levels deep and closed again; apostrophes are none."""
    text = re.sub(r"(?<=\w)['’](?=\w)", "", response).translate(str.maketrans("“”‘’", "\"\"''"))
    open_quotes: list[str] = []
    deepest = 0
    for character in text:
        if character not in "\"'":
            continue
        if open_quotes and open_quotes[-1] == character:
            deepest = max(deepest, len(open_quotes))
            open_quotes.pop()
        else:
            open_quotes.append(character)
    return deepest >= 3 and not open_quotes


def one_option(response: str, *, options: str) -> bool:
    """format:options: one of them and nothing else; letters such as a) must be given as they are written."""
    separator = "/" if "/" in options else " or " if " or " in options else ","
    choices = [option.strip() for option in options.split(separator)]
    if CHOICE_LIST.match(options):
        return response.strip() in choices
    return lower_words(response) in [lower_words(choice) for choice in choices]


def emoji_sentences(response: str) -> bool:
    """format:emoji: at the end of each sentence, before or after its end mark."""
    text = "".join(c for c in response.strip() if c not in "\ufe0f\u200d" and unicodedata.category(c) != "Sk")
    if not text or not (_is_emoji(text[-1]) or SENTENCE_END.search(text[-4:])):
        return False
    after_mark = 0
    for mark in re.finditer(r"[.!?]+[\"'”’)\]]*", text):
        before, after_mark = text[after_mark : mark.start()].rstrip()[-1:], mark.end()
        is_end = after_mark == len(text) or text[after_mark].isspace() or _is_emoji(text[after_mark])
        if is_end and not _is_emoji(before) and not _is_emoji(character_at(text, after_mark)):
            return False
    return True


def _is_emoji(character: str) -> bool:
    return bool(character) and (unicodedata.category(character) == "So" or 0x1F000 <= ord(character) <= 0x1FAFF)


def stairs(response: str) -> bool:
    """format:line_indent: each line further in than the one before."""
    indents = [len(line) - len(line.lstrip()) for line in lines(response)]
    return all(before < after for before, after in pairwise(indents))


def quotes_explained(response: str) -> bool:
    """format:quote_unquote: words outside quotes after every quoted phrase."""
    outside = re.split(r"[\"“”]", response)[2::2]
    return response.count('"') % 2 == 0 and all(re.search(r"\w", text) for text in outside)


def separator_list(response: str, *, sep: str) -> bool:
    """format:list: the separator twice or more, and no bullet points of the usual kind."""
    bullet = re.search(r"^[^\S\n]*[*•-]\s", response.replace(sep, ""), re.MULTILINE)
    return response.count(sep) >= 2 and bullet is None


def sub_bullets(response: str) -> bool:
    """format:sub-bullets: bullet points *, each with a sub-bullet - at least."""
    marks = [line.lstrip()[0] for line in lines(response) if line.lstrip()[0] in "*-"]
    pieces = "".join(marks).split("*")
    return len(pieces) > 1 and all(pieces[1:])


def sentences_then_bullets(response: str) -> bool:
    """format:no_bullets_bullets: two sentences with a full stop, then two bullet points *, at least."""
    found = lines(response)
    first = next((i for i, line in enumerate(found) if line.lstrip().startswith("*")), len(found))
    before = sentences("\n".join(found[:first]))
    bullets = [line for line in found[first:] if line.lstrip().startswith("*")]
    return sum(end_mark(sentence) == "." for sentence in before) >= 2 and len(bullets) >= 2


def title_case(response: str) -> bool:
    """format:title_case: words but the small ones (a, of, and, ...) begin with a capital."""
    found = [word for word in plain_words(response) if word[0].isalpha() and word.lower() not in MINOR_WORDS]
    return all(word[0].isupper() for word in found)


def multiple_choice_questions(response: str) -> bool:
    """custom:mcq_count_length: four blocks "Question ...", five options each, the questions ever longer."""
    before, *blocks = re.split(r"^[^\w\n]*Question\b", response, flags=re.MULTILINE)
    lengths = []
    for block in blocks:
        found = lines(block)
        options = [i for i, line in enumerate(found) if OPTION_LINE.match(line)]
        if len(options) != 5:
            return False
        lengths.append(len(" ".join(found[: options[0]])))
    return not re.search(r"\w", before) and len(blocks) == 4 and all(a < b for a, b in pairwise(lengths))


def sentence_alphabet(response: str) -> bool:
    """custom:sentence_alphabet: 26 sentences whose first letters are the alphabet."""
    firsts = [lower_words(sentence)[0][0] for sentence in sentences(response) if lower_words(sentence)]
    return "".join(firsts) == string.ascii_lowercase


def csv_special_character(response: str) -> bool:
    """custom:csv_special_character: the header, 14 rows, and a quoted field with a special character."""
    quoted = (text for line in response.split("\n") for text in line.split('"')[1:-1])
    return _is_table(response, CSV_PRODUCT, num_rows=14) and any(map(SPECIAL.search, quoted))


def csv_quotes(response: str) -> bool:
    """custom:csv_quotes: the header and 3 rows between tabs, every field of a row in double quotes."""
    fields = [field for line in lines(response)[1:] for field in line.strip().split("\t")]
    is_quoted = all(len(field) > 1 and field[0] == field[-1] == '"' for field in fields)
    return is_quoted and _is_table(response, CSV_STUDENT, num_rows=3, delimiter="\t")


def _is_table(response: str, header: list[str], *, num_rows: int, delimiter: str = ",") -> bool:
    text = re.sub(r"^```\w*\n|\n```$", "", response.strip())
    try:
        rows = [[field.strip() for field in row] for row in csv.reader(text.splitlines(), delimiter=delimiter) if row]
    except csv.Error:  # a field of more than 128 KiB
        return False
    return rows[:1] == [header] and len(rows) == num_rows + 1 and all(len(row) == len(header) for row in rows)


def date_list(response: str) -> bool:
    """custom:date_format_list: dates YYYY-MM-DD between commas and nothing else."""
    pattern = r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])"
    return all(re.fullmatch(pattern, part.strip()) for part in response.split(","))


def thesis(response: str) -> bool:
    """format:thesis: a statement in HTML's italics, and a text after it."""
    found = re.search(r"<(i|em)>(.*?)</\1>(.*)", response, re.DOTALL)
    return found is not None and bool(found[2].strip() and found[3].strip())


def african_countries(response: str) -> bool:
    """custom:reverse_newline: at least 52 names, a line each, from Zimbabwe down to Algeria."""
    plain = unicodedata.normalize("NFKD", response).encode("ascii", "ignore").decode().lower()
    found = [line.strip(" *-•.\t") for line in lines(plain)]
    is_whole = len(found) >= 52 and found[0] == "zimbabwe" and found[-1] == "algeria"
    return is_whole and found == sorted(found, reverse=True)


def northern_capitals(response: str) -> bool:
    """custom:european_capitals_sort: those of Europe north of 45 degrees, from north to south, between commas."""
    plain = unicodedata.normalize("NFKD", response).encode("ascii", "ignore").decode().lower()
    return [city.strip(" .\n").replace("kiev", "kyiv") for city in plain.split(",")] == CAPITALS


CHECKERS: dict[str, Callable[..., Any]] = {
    "format:parentheses": nested_parentheses,
    "format:quotes": nested_quotes,
    "format:options": one_option,
    "format:newline": lambda response: all(len(plain_words(line)) <= 1 for line in lines(response)),
    "format:emoji": emoji_sentences,
    "format:line_indent": stairs,
    "format:quote_unquote": quotes_explained,
    "format:list": separator_list,
    "format:sub-bullets": sub_bullets,
    "format:no_bullets_bullets": sentences_then_bullets,
    "format:title_case": title_case,
    # the three headings in order, each filled in
    "format:output_template": lambda response: TEMPLATE.match(response) is not None,
    "format:no_whitespace": lambda response: not any(character.isspace() for character in response.strip()),
    # those from 10 to 50
    "format:thesis": thesis,
    "custom:reverse_newline": african_countries,
    "custom:european_capitals_sort": northern_capitals,
    "custom:multiples": lambda response: (
        [Decimal(number) for number in re.findall(r"\d+", response)] == list(range(14, 51, 7))
    ),
    "custom:mcq_count_length": multiple_choice_questions,
    # a sentence about the bald eagle, last word first
    "custom:word_reverse": lambda response: "bald eagle" in " ".join(reversed(lower_words(response))),
    # a sentence about the bald eagle, last letter first
    "custom:character_reverse": lambda response: "bald eagle" in response.lower()[::-1],
    "custom:sentence_alphabet": sentence_alphabet,
    # the header and 7 rows
    "custom:csv_city": lambda response: _is_table(response, CSV_CITY, num_rows=7),
    "custom:csv_special_character": csv_special_character,
    "custom:csv_quotes": csv_quotes,
    "custom:date_format_list": date_list,
}
