"""The reward of rm_type ifbench: whether a response follows every instruction of its prompt, checked strictly.

Our own checks of all instruction ids of IFEval and IFBench, so that nothing is fetched or installed. They read a
response and the metadata of its prompt: `instruction_id_list` and, per instruction, `kwargs`.

The instructions of IFEval are here (Zhou et al. 2023, "Instruction-Following Evaluation for Large Language Models"): a
row for each instruction id, which reads the response as it is. Where IFEval asks a language detector, so does this
(package langdetect); the two case instructions accept any text of that case when it is not installed.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from slime.rollout.rm_hub.ifbench import formats, text
from slime.rollout.rm_hub.ifbench.text import compares, sentences, words
from slime.utils.errors import nearest

__all__ = ["CHECKERS", "compute_ifbench_reward", "follows"]

CONSTRAINED_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
JSON_FENCE = re.compile(r"^```(?:json)?|```$", re.IGNORECASE)


def compute_ifbench_reward(
    response: str | None, label: object = None, metadata: Mapping[str, Any] | None = None
) -> float:
    """1.0 when a response that is not blank follows every instruction, else 0.0.

    Args:
        response: as the model gave it.
        label: unused; graders have one.
        metadata: `instruction_id_list` (names in `CHECKERS`) and `kwargs` (a dict or None for each).

    Raises:
        ValueError: no instructions, an unknown one, or arguments that it does not have.
    """
    facts = metadata or {}
    ids, arguments = facts.get("instruction_id_list"), facts.get("kwargs")
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"the ifbench reward needs metadata['instruction_id_list'], a list of names, got {ids!r}")
    arguments = [None] * len(ids) if arguments is None else arguments
    if not isinstance(arguments, list) or len(arguments) != len(ids):
        raise ValueError(f"metadata['kwargs'] needs one entry for each of the {len(ids)} instructions: {arguments!r}")
    # Every instruction is looked at, so that a mistake in the data shows whatever the model wrote.
    followed = [follows(response or "", name, given) for name, given in zip(ids, arguments, strict=True)]
    return float(all(followed))


def follows(response: str, name: str, arguments: Mapping[str, Any] | None = None) -> bool:
    """Whether a response follows one instruction; a blank one follows none.

    Args:
        response: as the model gave it.
        name: the instruction's id.
        arguments: the instruction's; entries that are None (data sets have a column per argument) do not count.
    """
    if name not in CHECKERS:
        near = nearest(name, CHECKERS)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"unknown instruction {name!r}: {hint}known are {', '.join(sorted(CHECKERS))}")
    given = {key: _whole(value) for key, value in (arguments or {}).items() if value is not None}
    try:
        inspect.signature(CHECKERS[name]).bind(response, **given)
    except TypeError as error:
        raise ValueError(f"the instruction {name} was given {given!r}: {error}") from error
    return bool(response.strip() and CHECKERS[name](response, **given))


def _whole(value: Any) -> Any:
    """A whole number as int: tables hold optional integers as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def response_language(response: str, *, language: str) -> bool:
    """language:response_language; a text that the detector cannot judge counts as right."""
    detected = _detect_language(response)
    if detected is None:
        raise ModuleNotFoundError("language:response_language needs the package langdetect: pip install langdetect")
    return detected in ("", language)


def _detect_language(text: str) -> str | None:
    """A language code, "" where there is nothing to judge by, None without the detector."""
    try:
        import langdetect
    except ModuleNotFoundError:
        return None
    try:
        return str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return ""


def number_paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """length_constraints:number_paragraphs: separated by ***; only the first and the last piece may be empty."""
    pieces = re.split(r"\s?\*\*\*\s?", response)
    if not all(piece.strip() for piece in pieces[1:-1]):
        return False
    return sum(bool(piece.strip()) for piece in pieces) == num_paragraphs


def nth_paragraph_first_word(response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """length_constraints:nth_paragraph_first_word: paragraphs are separated by an empty line."""
    pieces = response.split("\n\n")
    count = sum(bool(piece.strip()) for piece in pieces)
    if not 1 <= nth_paragraph <= min(count, len(pieces)) or not pieces[nth_paragraph - 1].strip():
        return False
    word = pieces[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return count == num_paragraphs and re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def has_postscript(response: str, *, postscript_marker: str) -> bool:
    """detectable_content:postscript."""
    pattern = POSTSCRIPTS.get(postscript_marker, re.escape(postscript_marker.lower()))
    return bool(re.search(pattern, response.lower()))


def number_bullets(response: str, *, num_bullets: int) -> bool:
    """detectable_format:number_bullet_lists: lines that begin with * or -, exactly so many."""
    stars = re.findall(r"^[^\S\n]*\*[^\*].*$", response, re.MULTILINE)
    return len(stars) + len(re.findall(r"^[^\S\n]*-.*$", response, re.MULTILINE)) == num_bullets


def highlighted_sections(response: str, *, num_highlights: int) -> bool:
    """detectable_format:number_highlighted_sections: *so* or **so**, at least so many."""
    marked = re.findall(r"\*[^\n\*]*\*", response) + re.findall(r"\*\*[^\n\*]*\*\*", response)
    return sum(bool(text.strip("*").strip()) for text in marked) >= num_highlights


def json_format(response: str) -> bool:
    """detectable_format:json_format: all of it JSON, a fence around it allowed."""
    try:
        json.loads(JSON_FENCE.sub("", response.strip()).strip())
    except (ValueError, RecursionError):  # nested too deep
        return False
    return True


def _title(line: str) -> str:
    """What stands between the first << and the last >> of a line."""
    start, end = line.find("<<"), line.rfind(">>")
    return line[start:end].strip("<>").strip() if 0 <= start < end else ""


def two_responses(response: str) -> bool:
    """combination:two_responses: two different ones, separated by ******."""
    pieces = [piece.strip() for piece in response.split("******")]
    valid = [piece for piece in pieces if piece]
    return all(pieces[1:-1]) and len(valid) == 2 and valid[0] != valid[1]


def is_quoted(response: str) -> bool:
    """startend:quotation: double quotes around the whole."""
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


_IFEVAL: dict[str, Callable[..., Any]] = {
    "keywords:existence": lambda response, *, keywords: all(
        re.search(re.escape(keyword), response, re.IGNORECASE) for keyword in keywords
    ),
    "keywords:frequency": lambda response, *, keyword, frequency, relation: compares(
        len(re.findall(re.escape(keyword), response, re.IGNORECASE)), relation, frequency
    ),
    "keywords:forbidden_words": lambda response, *, forbidden_words: (
        not any(re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words)
    ),
    # without regard to case
    "keywords:letter_frequency": lambda response, *, letter, let_frequency, let_relation: compares(
        response.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "language:response_language": response_language,
    "length_constraints:number_sentences": lambda response, *, num_sentences, relation: compares(
        len(sentences(response)), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": lambda response, *, num_words, relation: compares(
        len(words(response)), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    # [in square brackets], at least so many
    "detectable_content:number_placeholders": lambda response, *, num_placeholders: (
        len(re.findall(r"\[[^\[\]\n]*\]", response)) >= num_placeholders
    ),
    "detectable_content:postscript": has_postscript,
    "detectable_format:number_bullet_lists": number_bullets,
    "detectable_format:constrained_response": lambda response: any(
        answer in response for answer in CONSTRAINED_ANSWERS
    ),
    "detectable_format:number_highlighted_sections": highlighted_sections,
    # "<splitter> <number>", at least so many
    "detectable_format:multiple_sections": lambda response, *, section_spliter, num_sections: (
        len(re.split(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", response)) - 1 >= num_sections
    ),
    "detectable_format:json_format": json_format,
    # <<so>>
    "detectable_format:title": lambda response: any(_title(line) for line in response.split("\n")),
    "combination:two_responses": two_responses,
    # the response begins with the prompt
    "combination:repeat_prompt": lambda response, *, prompt_to_repeat: (
        response.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda response, *, end_phrase: (
        response.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": is_quoted,
    # words all in capitals
    "change_case:capital_word_frequency": lambda response, *, capital_frequency, capital_relation: compares(
        sum(word.isupper() for word in response.split()), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda response: (
        response.isupper() and _detect_language(response) in (None, "", "en")
    ),
    "change_case:english_lowercase": lambda response: (
        response.islower() and _detect_language(response) in (None, "", "en")
    ),
    "punctuation:no_comma": lambda response: "," not in response,
}
CHECKERS = _IFEVAL | text.CHECKERS | formats.CHECKERS
