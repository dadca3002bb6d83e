"""What a model wrote, taken apart: its thought, its text, its tool calls.

SGLang's parsers do the work, chosen by their names there; they are imported at first use. They drop a call whose JSON
is broken or whose tool is unknown. Here such a call stays in the text, and the result is flagged as ill-formed.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from dataclasses import dataclass, field
from typing import Any

from slime.agent.history import has_template
from slime.backends.sglang_utils.cpu_standins import install as install_cpu_standins
from slime.rollout.multi_turn import turn_content, turn_markers
from slime.utils.errors import UsageError

logger = logging.getLogger(__name__)
ToolUse = dict[str, Any]
_THOUGHT_END = "</think>"
_XML_CALL = re.compile(r"<tool_call>\s*<function=([^>\s]+)>(.*?)</function>\s*</tool_call>", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
# What SGLang's detectors raise on texts that they cannot read; pythonic ones parse Python.
_PARSER_ERRORS = (ValueError, LookupError, TypeError, AttributeError, RecursionError, SyntaxError)


@dataclass(frozen=True)
class ParsedModelOutput:
    """One turn of a model; `tool_uses` are `{"name", "input": dict}`, in order."""

    reasoning: str
    text: str
    tool_uses: list[ToolUse] = field(default_factory=list)
    ill_formed: bool = False
    """A call could not be read: it is in `text`, or its arguments are `{"_raw_arguments": text}`."""


def written_text(tokenizer: Any, ids: list[int]) -> str:
    """The text of a turn: special tokens kept, without the marker that ends it, with a thought that the generation
    prompt began.
    """
    if has_template(tokenizer):
        try:
            return turn_content(tokenizer, ids)
        except ValueError:  # the template marks no turns
            logger.debug("the chat template marks no turns")
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def begins_thought(tokenizer: Any) -> bool:
    """Return whether the generation prompt opens a thought, which the model has to end."""
    if not has_template(tokenizer):
        return False
    try:
        prefill = turn_markers(tokenizer).prefill
    except ValueError:  # the template marks no turns
        return False
    return "<think>" in prefill and _THOUGHT_END not in prefill


def parser_names(tokenizer: Any, tool: str | None, reasoning: str | None) -> tuple[str | None, str | None]:
    """Return SGLang's names of the tool and the reasoning parser; those not given, or "auto", fit the chat template.

    None is left where SGLang knows none for the template.
    """
    install_cpu_standins()
    from sglang.srt.parser import template_detection as detection

    template = tokenizer.chat_template if has_template(tokenizer) else None
    is_forced, toggle = detection.detect_reasoning_pattern(template)
    shown = template, tokenizer, toggle, is_forced
    if tool in (None, "auto"):
        tool = detection.detect_tool_call_parser(*shown)
    if reasoning in (None, "auto"):
        reasoning = detection.detect_reasoning_parser(*shown)
    logger.info("agents' parsers: tool calls by %s, thoughts by %s", tool, reasoning)
    return tool, reasoning


def parse_model_output(
    raw: str,
    *,
    tools_schema: list[dict[str, Any]] | None,
    tool_parser_name: str | None,
    reasoning_parser_name: str | None,
) -> ParsedModelOutput:
    """Take a turn apart.

    Args:
        raw: the decoded text, special tokens kept, without the marker that ends the turn.
        tools_schema: chat tools (`{"type": "function", "function": {...}}`); without any, nothing is a call.
        tool_parser_name: SGLang's `--tool-call-parser`; None knows only the XML form.
        reasoning_parser_name: SGLang's `--reasoning-parser`; None leaves thoughts in the text.

    Raises:
        UsageError: SGLang has no parser of a name.
    """
    reasoning, text = _split_reasoning(raw, reasoning_parser_name) if reasoning_parser_name else ("", raw)
    text, uses, ill_formed = parse_tool_uses(text, tools_schema, tool_parser_name)
    return ParsedModelOutput(reasoning=reasoning, text=text.strip(), tool_uses=uses, ill_formed=ill_formed)


def _split_reasoning(raw: str, name: str) -> tuple[str, str]:
    install_cpu_standins()
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    _check_name("reasoning", name.lower(), ReasoningParser.DetectorMap)
    reasoning, text = ReasoningParser(model_type=name, stream_reasoning=False).parse_non_stream(raw)
    if not reasoning and _THOUGHT_END in raw:
        thought, _, text = raw.rpartition(_THOUGHT_END)
        reasoning = thought.replace("<think>", "", 1)
    return (reasoning or "").strip(), text or ""


def _check_name(kind: str, name: str, known: dict[str, Any]) -> None:
    if name not in known:
        raise UsageError(f"SGLang has no {kind} parser {name!r}; it has {', '.join(sorted(known))}")


def parse_tool_uses(
    text: str, tools_schema: list[dict[str, Any]] | None, name: str | None
) -> tuple[str, list[ToolUse], bool]:
    """Find the calls in a text, by SGLang's parser and then in the XML form.

    Returns:
        (text without the calls, calls, whether one could not be read).

    Raises:
        UsageError: SGLang has no parser of this name.
    """
    if not tools_schema:
        return text, [], False
    ill_formed = False
    if name:
        rest, uses, ill_formed = _parse_by_name(text, tools_schema, name)
        if uses:
            return rest, uses, ill_formed
    rest, uses = parse_xml_tool_uses(text, tools_schema)
    if uses:
        ill_formed = False  # the parser of the name saw a call in a form that it does not know
    return rest, uses, ill_formed or "<tool_call>" in _XML_CALL.sub("", rest)


def _parse_by_name(text: str, tools_schema: list[dict[str, Any]], name: str) -> tuple[str, list[ToolUse], bool]:
    parser = _function_call_parser(json.dumps(tools_schema), name)
    try:
        is_call = parser.has_tool_call(text)
        rest, calls = parser.parse_non_stream(text)
    except _PARSER_ERRORS as error:
        logger.warning("SGLang's parser %s failed on %r: %s: %s", name, text[:300], type(error).__name__, error)
        return text, [], True
    if is_call and not calls:
        return text, [], True
    uses = [_tool_use(call) for call in calls]
    lost = _lost_calls(text, parser, len(calls)) if is_call else []
    return "\n".join([rest, *lost]), uses, bool(lost) or any("_raw_arguments" in use["input"] for use in uses)


def _function_call_parser(schema: str, name: str) -> Any:
    install_cpu_standins()  # without triton, SGLang cannot be imported otherwise
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    _check_name("tool call", name, FunctionCallParser.ToolCallParserEnum)
    return FunctionCallParser(_sglang_tools(schema), tool_call_parser=name)  # it keeps state: one for each text


@functools.lru_cache(maxsize=64)
def _sglang_tools(schema: str) -> list[Any]:
    from sglang.srt.entrypoints.openai.protocol import Function, Tool

    functions = [tool["function"] for tool in json.loads(schema)]
    return [Tool(type="function", function=Function(**function)) for function in functions]


def _tool_use(call: Any) -> ToolUse:
    try:
        arguments = json.loads(call.parameters or "{}")
    except (ValueError, RecursionError):
        arguments = None
    is_object = isinstance(arguments, dict)
    return {"name": call.name, "input": arguments if is_object else {"_raw_arguments": call.parameters}}


def _lost_calls(text: str, parser: Any, num_found: int) -> list[str]:
    """The calls between a detector's markers that it dropped."""
    begin, end = parser.detector.bot_token.strip(), parser.detector.eot_token.strip()
    if not begin or not end or text.count(begin) <= num_found:
        return []
    written = re.findall(rf"{re.escape(begin)}.*?(?:{re.escape(end)}|\Z)", text, re.DOTALL)
    return [call for call in written if not parser.detector.detect_and_parse(call, parser.tools).calls]


_JSON_RULES = r"""
object ::= "{" ws (pair (ws "," ws pair)*)? ws "}"
pair ::= string ws ":" ws value
value ::= object | array | string | number | "true" | "false" | "null"
array ::= "[" ws (value (ws "," ws value)*)? ws "]"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F]))* "\""
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+-]? [0-9]+)?
ws ::= " "?
"""


def call_grammar(tools_schema: list[dict[str, Any]], name: str | None, *, begun_thought: bool = False) -> str:
    """The EBNF of exactly one call of one of the tools, as a model writes it for SGLang's parser `name`.

    An `ebnf` is what passes the router: it drops structural tags from the bodies of /generate.

    Args:
        begun_thought: the generation prompt has opened a thought, which is ended first.

    Raises:
        UsageError: there is no such form: no parser, or one whose calls hold no JSON.
    """
    calls = [] if name is None else [_call_ends(tool, name) for tool in tools_schema]
    if not all(calls) or not calls:
        raise UsageError(f"tool calls cannot be forced: the tool call parser {name!r} has no JSON form for a grammar")
    quoted = [[json.dumps(end, ensure_ascii=False) for end in ends] for ends in calls if ends]
    forms = [" object ".join(ends) for ends in quoted]
    thought = r'([^<] | "<" [^/])* "</think>" "\n"* ' if begun_thought else ""
    return f"root ::= {thought}({' | '.join(forms)})" + _JSON_RULES


def _call_ends(tool: dict[str, Any], name: str) -> tuple[str, str] | None:
    """What surrounds the arguments of a call; None where the parser does not read such a call back."""
    parser = _function_call_parser(json.dumps([tool]), name)
    function = tool["function"]["name"]
    try:
        info = parser.detector.structure_info()(function)
        calls = parser.detector.detect_and_parse(info.begin + '{"x": 1}' + info.end, parser.tools).calls
        found = [(call.name, json.loads(call.parameters)) for call in calls]
    except (NotImplementedError, *_PARSER_ERRORS):
        return None
    return (info.begin, info.end) if found == [(function, {"x": 1})] else None


def parse_xml_tool_uses(text: str, tools_schema: list[dict[str, Any]] | None) -> tuple[str, list[ToolUse]]:
    """Find calls in the XML form.

    Values are stripped text, whatever type the schema names; a call of an unknown tool stays in the text.

    Example:
        >>> schema = [{"type": "function", "function": {"name": "add"}}]
        >>> call = "<tool_call><function=add><parameter=a> 1 </parameter></function></tool_call>"
        >>> parse_xml_tool_uses("Sure. " + call, schema)
        ('Sure.', [{'name': 'add', 'input': {'a': '1'}}])
    """
    known = {tool.get("function", {}).get("name") for tool in tools_schema or []}
    uses: list[ToolUse] = []

    def take(match: re.Match[str]) -> str:
        if match[1] not in known:
            return match[0]
        values = {key: value.strip() for key, value in _XML_PARAMETER.findall(match[2])}
        uses.append({"name": match[1], "input": values})
        return ""

    cleaned = _XML_CALL.sub(take, text)
    return (cleaned.strip() if uses else text), uses
