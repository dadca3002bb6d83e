"""The tool calls in what a model wrote, by SGLang's names of the formats."""

from __future__ import annotations

import re
from typing import Any

from slime.agent.parsing import parse_tool_uses
from slime.rollout.tool_calls import parse_tool_calls, tool_names

# SGLang's parsers of this format drop calls that they cannot read, so slime's own is used, which says what is wrong.
JSON_PARSERS = ("qwen25", "hermes")
_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)


def parse_tools(response: str, tools: list[dict[str, Any]], parser: str = "qwen25") -> dict[str, Any]:
    """Text and calls of a turn.

    Returns:
        `{"normal_text": str, "calls": [{"name", "input"}], "problem": str}`; `problem` says why a call cannot be made.

    Raises:
        UsageError: SGLang has no parser of this name.
    """
    if parser not in JSON_PARSERS:
        text, uses, is_ill_formed = parse_tool_uses(response, tools, parser)
        return {"normal_text": text, "calls": uses, "problem": "the call cannot be read" * is_ill_formed}
    known, calls = tool_names(tools), parse_tool_calls(response)
    problems = [call.problem or f"no tool {call.name}; there is {', '.join(known)}" for call in calls]
    readable = [not call.problem and call.name in known for call in calls]
    return {
        "normal_text": _CALL.sub("", response).strip(),
        "calls": [{"name": c.name, "input": c.arguments} for c, fine in zip(calls, readable, strict=True) if fine],
        "problem": next((text for text, fine in zip(problems, readable, strict=True) if not fine), ""),
    }
