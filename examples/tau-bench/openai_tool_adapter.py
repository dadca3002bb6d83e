"""Turn what a model wrote into OpenAI's assistant message and tau-bench's next action."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sglang_tool_parser import parse_tools

from slime.rollout.tool_calls import ToolCall


@dataclass(frozen=True)
class OpenAIToolAdapter:
    """Reads turns with the tools of an environment.

    Args:
        tools_info: their schemas.
        parser_type: SGLang's name of the format.
    """

    tools_info: list[dict[str, Any]]
    parser_type: str = "qwen25"

    def action_of(self, response: str) -> ToolCall | str:
        """The first call of a turn, or what it says to the user; a call with a `problem` where it cannot be read.

        What the model thought before `</think>` is neither.
        """
        found = parse_tools(response.rpartition("</think>")[2], self.tools_info, self.parser_type)
        if found["problem"]:
            return ToolCall(problem=found["problem"])
        if found["calls"]:
            return ToolCall(found["calls"][0]["name"], dict(found["calls"][0]["input"]))
        return str(found["normal_text"]).strip()

    def parse_response_to_openai_format(self, response: str) -> dict[str, Any]:
        """The assistant message: `{"role", "content", "tool_calls"}`, arguments as JSON text."""
        found = parse_tools(response, self.tools_info, self.parser_type)
        calls = [
            {"type": "function", "function": {"name": call["name"], "arguments": json.dumps(call["input"])}}
            for call in found["calls"]
        ]
        return {"role": "assistant", "content": found["normal_text"], "tool_calls": calls or None}


def create_openai_adapter(tools_info: list[dict[str, Any]], parser_type: str = "qwen25") -> OpenAIToolAdapter:
    """An adapter for the tools of an environment."""
    return OpenAIToolAdapter(tools_info, parser_type)
