r"""ReTool: a model that computes with Python programs, and answers in a box.

    --custom-generate-function-path generate_with_retool.generate --custom-rm-path generate_with_retool.reward_func
    --reward-key score

The loop is that of `slime.rollout.multi_turn`: a call's result is the next turn, of the tool, as the chat template
writes it. A program may be called for in three ways: `<tool_call>{json}</tool_call>`, `<code>...</code>`, and a fenced
block of Python; `Answer: \boxed{...}` ends the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tool_sandbox import config_of

from slime.agent.sandbox import BACKENDS
from slime.rollout.multi_turn import Conversation, converse
from slime.rollout.rm_hub import compute_score_dapo
from slime.rollout.tool_calls import ToolCall, parse_tool_calls
from slime.utils.errors import UsageError
from slime.utils.types import Sample

_ANSWER = re.compile(r"Answer:\s*\\boxed\{")
_PROGRAM = re.compile(r"<code>\s*(.*?)\s*</code>|```(?:python|py)\s*\n(.*?)```", re.DOTALL)
_FENCE = re.compile(r"\A```(?:python|py)?\s*\n(.*?)\n?```\Z", re.DOTALL)


def postprocess_predictions(prediction: str) -> list[ToolCall]:
    """The programs that a turn asks for; none where it answers. What is thought before `</think>` asks for nothing."""
    said = prediction.rpartition("</think>")[2]
    if _ANSWER.search(said):
        return []
    if calls := parse_tool_calls(said):
        return calls
    program = _PROGRAM.search(said)
    if not program:
        return []
    code = program[1] if program[1] is not None else program[2]
    fenced = _FENCE.match(code)
    return [ToolCall("code_interpreter", {"code": fenced[1] if fenced else code})]


class ReToolConversation(Conversation):
    """A conversation whose programs come in three forms, `max_tool_calls` of them at most."""

    def calls(self, text: str) -> list[ToolCall]:
        """The programs of a turn; those above the limit are answered with an error."""
        wanted = postprocess_predictions(text)
        limit = config_of(self.args)["max_tool_calls"]
        left = max(limit - self.sample.metadata["tool_calls"], 0)
        refused = ToolCall(problem=f"no call is left, all {limit} are made; answer")
        return [*wanted[:left], *(refused for _ in wanted[left:])]


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Solve one problem; as `slime.rollout.multi_turn.generate`, whose arguments and limits it has."""
    return await converse(ReToolConversation(args, sample), sampling_params, evaluation)


def check_args(args: Any) -> Iterator[str]:
    """A sentence for each setting that cannot be; slime asks before a run starts."""
    if not vars(args).get("tool_function_path"):
        yield "retool needs tool_function_path: tool_sandbox.code_interpreter in the file of --custom-config-path."
    try:
        backend = config_of(args)["backend"]
    except UsageError as error:
        yield from error.messages
        return
    if backend not in BACKENDS:
        yield f"retool in --custom-config-path: there is no backend {backend!r}; there is {', '.join(BACKENDS)}."


generate.check_args = check_args  # type: ignore[attr-defined]


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    r"""`{"score", "acc", "pred"}`: 1 for the right box in the last message, else -1.1 to -0.6, by the number of calls.

    A wrong answer loses less for each call, so that a model which cannot solve anything yet learns to compute.
    """
    messages = sample.metadata.get("messages") or [{"role": "", "content": ""}]
    is_whole = sample.status is Sample.Status.COMPLETED and messages[-1]["role"] == "assistant"
    result = compute_score_dapo(messages[-1]["content"] if is_whole else "", sample.label, strict_box_verify=True)
    if result["score"] < 0:
        result["score"] = min(-0.6, result["score"] + (sample.metadata.get("tool_calls", 0) - 2) / 2 * 0.1)
    return result
