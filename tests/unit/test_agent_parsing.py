"""Thoughts, texts and calls of a turn; a call that SGLang's parsers drop stays in the text and is flagged."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slime.agent.parsing import (
    ParsedModelOutput,
    parse_model_output,
    parse_tool_uses,
    parse_xml_tool_uses,
    parser_names,
)
from slime.utils.errors import UsageError
from tests.rollout.chat_tokenizers import family_tokenizer

SCHEMA = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
    for name in ("add", "bash")
]
GOOD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
USE = {"name": "add", "input": {"a": 1}}
XML = "<tool_call>\n<function=bash>\n<parameter=cmd>\nls -l\n</parameter>\n</function>\n</tool_call>"


def parse(raw, tool=None, reasoning=None, schema=SCHEMA):
    return parse_model_output(raw, tools_schema=schema, tool_parser_name=tool, reasoning_parser_name=reasoning)


def test_without_parsers_a_text_is_stripped_and_nothing_else():
    assert parse(" hello\n", schema=None) == ParsedModelOutput("", "hello", [], False)
    assert parse(GOOD, schema=None).text == GOOD, "without tools nothing is a call"


def test_the_xml_form_needs_no_parser_and_leaves_unknown_tools_in_the_text():
    assert parse("Sure.\n" + XML) == ParsedModelOutput("", "Sure.", [{"name": "bash", "input": {"cmd": "ls -l"}}])
    unknown = XML.replace("bash", "rm")
    assert parse_xml_tool_uses(unknown, SCHEMA) == (unknown, [])
    assert parse(unknown).text == unknown


def test_sglangs_parsers_take_thought_and_calls_apart():
    two = GOOD + "\n" + GOOD.replace("1", "2")
    parsed = parse(f"<think>\nhm\n</think>\n\nSure.\n{two}", "qwen25", "qwen3")
    assert (parsed.reasoning, parsed.text, parsed.ill_formed) == ("hm", "Sure.", False)
    assert parsed.tool_uses == [USE, {"name": "add", "input": {"a": 2}}]


@pytest.mark.parametrize("name", ["qwen3", "deepseek-r1", "glm45"])
def test_a_thought_whose_beginning_the_prompt_had_is_found(name):
    parsed = parse("hm\n</think>\n\nSure.", reasoning=name)
    assert (parsed.reasoning, parsed.text) == ("hm", "Sure.")


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>\n{"name": "add", \n</tool_call>',
        '<tool_call>\n{"name": "rm"}\n</tool_call>',
        '<tool_call>\n{"name"',
    ],
    ids=["no JSON", "unknown tool", "unclosed"],
)
def test_a_call_that_the_parser_drops_stays_in_the_text_and_is_flagged(broken):
    alone = parse("Sure.\n" + broken, "qwen25")
    assert (alone.text, alone.tool_uses, alone.ill_formed) == ("Sure.\n" + broken, [], True)
    beside = parse(GOOD + "\n" + broken, "qwen25")
    assert (beside.tool_uses, beside.ill_formed) == ([USE], True)
    assert broken in beside.text


def test_arguments_that_are_no_object_are_kept_as_text():
    text, uses, ill_formed = parse_tool_uses(
        '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>', SCHEMA, "qwen25"
    )
    assert (uses, ill_formed) == ([{"name": "add", "input": {"_raw_arguments": "[1]"}}], True)


def test_the_xml_form_is_found_where_the_named_parser_finds_nothing():
    parsed = parse(XML, "qwen25")
    assert (parsed.tool_uses, parsed.ill_formed) == ([{"name": "bash", "input": {"cmd": "ls -l"}}], False)


def test_a_broken_xml_call_is_flagged_without_a_parser_too():
    broken = "<tool_call><function=bash><parameter=cmd>ls"
    assert (parse(broken).text, parse(broken).ill_formed) == (broken, True)


@pytest.mark.parametrize(("kind", "names"), [("tool call", ("qwen99", None)), ("reasoning", (None, "qwen99"))])
def test_an_unknown_parser_is_named_with_those_there_are(kind, names):
    with pytest.raises(UsageError, match=f"SGLang has no {kind} parser 'qwen99'; it has .*qwen"):
        parse("text", *names)


def test_importing_the_package_needs_neither_sglang_nor_transformers_nor_torch():
    program = (
        "import pkgutil, importlib, sys, slime.agent\n"
        "for m in pkgutil.walk_packages(slime.agent.__path__, 'slime.agent.'): importlib.import_module(m.name)\n"
        "print([n for n in ('sglang', 'transformers', 'torch', 'e2b', 'openai', 'anthropic') if n in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("family", "names"),
    [("qwen3", ("qwen", "qwen3")), ("glm4_5", ("glm45", "deepseek-r1")), ("llama3", (None, None))],
)
def test_parsers_fit_the_chat_template_unless_they_are_named(family, names):
    tokenizer = family_tokenizer(family)
    assert parser_names(tokenizer, None, None) == parser_names(tokenizer, "auto", "auto") == names
    assert parser_names(tokenizer, "kimi_k2", None) == ("kimi_k2", names[1])
