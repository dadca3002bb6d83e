"""IFBench's instructions about the form of a response: the families format: and custom:.

One function per instruction id, from the instruction's wording (Pyatkin et al. 2025). It knows neither samples nor the
other instructions of a prompt. Left out are instructions whose wording does not decide (a section's thesis) or that
need a parser or facts: see the package's docstring.
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
    SENTENCE_END,
    character_at,
    end_mark,
    lines,
    lower_words,
    plain_words,
    sentences,
)
from slime.rollout.rm_hub.ifbench.word_lists import MINOR_WORDS

BRACKETS = {")": "(", "]": "[", "}": "{"}
CHOICE_LIST = re.compile(r"\W*a\W*b\W*c\b", re.IGNORECASE)
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


def word_per_line(response: str) -> bool:
    """format:newline."""
    return all(len(plain_words(line)) <= 1 for line in lines(response))


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


def output_template(response: str) -> bool:
    """format:output_template: the three headings in order, each filled in."""
    return TEMPLATE.match(response) is not None


def no_whitespace(response: str) -> bool:
    """format:no_whitespace."""
    return not any(character.isspace() for character in response.strip())


def multiples_of_seven(response: str) -> bool:
    """custom:multiples: those from 10 to 50."""
    return [Decimal(number) for number in re.findall(r"\d+", response)] == list(range(14, 51, 7))


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


def reversed_words(response: str) -> bool:
    """custom:word_reverse: a sentence about the bald eagle, last word first."""
    return "bald eagle" in " ".join(reversed(lower_words(response)))


def reversed_characters(response: str) -> bool:
    """custom:character_reverse: a sentence about the bald eagle, last letter first."""
    return "bald eagle" in response.lower()[::-1]


def sentence_alphabet(response: str) -> bool:
    """custom:sentence_alphabet: 26 sentences whose first letters are the alphabet."""
    firsts = [lower_words(sentence)[0][0] for sentence in sentences(response) if lower_words(sentence)]
    return "".join(firsts) == string.ascii_lowercase


def csv_city(response: str) -> bool:
    """custom:csv_city: the header and 7 rows."""
    return _is_table(response, CSV_CITY, num_rows=7)


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


CHECKERS: dict[str, Callable[..., Any]] = {
    "format:parentheses": nested_parentheses,
    "format:quotes": nested_quotes,
    "format:options": one_option,
    "format:newline": word_per_line,
    "format:emoji": emoji_sentences,
    "format:line_indent": stairs,
    "format:quote_unquote": quotes_explained,
    "format:list": separator_list,
    "format:sub-bullets": sub_bullets,
    "format:no_bullets_bullets": sentences_then_bullets,
    "format:title_case": title_case,
    "format:output_template": output_template,
    "format:no_whitespace": no_whitespace,
    "custom:multiples": multiples_of_seven,
    "custom:mcq_count_length": multiple_choice_questions,
    "custom:word_reverse": reversed_words,
    "custom:character_reverse": reversed_characters,
    "custom:sentence_alphabet": sentence_alphabet,
    "custom:csv_city": csv_city,
    "custom:csv_special_character": csv_special_character,
    "custom:csv_quotes": csv_quotes,
    "custom:date_format_list": date_list,
}
