"""Tool calls in what a model wrote, and calling the user's tool function.

The format is that of Hermes and Qwen: `<tool_call>{"name": "calculator", "arguments": {...}}</tool_call>`, any number
of times.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
from collections.abc import Awaitable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime.config.args import Args
from slime.processes.wait import CallTimeout, DaemonThreads
from slime.utils.async_utils import cancel_all, is_cancellation
from slime.utils.errors import HttpError
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolFn(Protocol):
    """`tool_function_path` in the file of --custom-config-path: make one call; return text, or what JSON can show.

    A coroutine function, or a plain one, which runs in one of --tool-concurrency threads. `ToolError` is for calls
    that the model got wrong.
    """

    def __call__(self, args: Args, sample: Sample, name: str, arguments: dict[str, Any]) -> Any: ...


class ToolError(Exception):
    """Raise it in a tool function when the model's arguments are at fault: the model reads the message and goes on.

    Any other exception is an error of the tool itself, and ends the sample.
    """


class EnvError(Exception):
    """Raise it in a tool function when the environment failed (a sandbox is gone, a service is down).

    The sample ends with `env_error`, and its reward is not trusted: --on-untrusted-reward. A `ConnectionError`, or an
    `HttpError` that is no refusal, counts as one.
    """


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it; `problem` says why it cannot be made."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in a turn, in order; what a model thinks before `</think>` is no call.

    Example: `'<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'` gives `[ToolCall("add", {"a": 1})]`.
    """
    said = text.rpartition("</think>")[2]
    return [_parse_one(match[1]) for match in _CALL.finditer(said)]


def _parse_one(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except json.JSONDecodeError as error:
        return ToolCall(problem=f"the call is no JSON: {error.msg}")
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 5,000 brackets
        return ToolCall(problem=f"the call cannot be read: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(problem='a call is a JSON object with "name" and "arguments"')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(name=call["name"], problem='"arguments" must be a JSON object')
    return ToolCall(name=call["name"], arguments=arguments)


def tool_names(tools: list[dict[str, Any]] | None) -> list[str]:
    """Names in a list of tool schemas, `{"type": "function", "function": {"name": ...}}` or `{"name": ...}`."""
    functions = [schema.get("function") or schema for schema in tools or []]
    return [str(function["name"]) for function in functions if "name" in function]


class ToolThreads(metaclass=SingletonMeta):
    """The threads of this process's plain tool functions, apart from those of graders; and the count of time-outs."""

    num_timeouts = 0  # on the class: coroutine functions time out without an instance

    def __init__(self, args: Args) -> None:
        self.threads = DaemonThreads("tool", args.tool_concurrency, kills_processes=True)


def take_tool_timeouts() -> int:
    """Tool calls that took too long since the last call, in training and evaluation."""
    count, ToolThreads.num_timeouts = ToolThreads.num_timeouts, 0
    return count


async def call_tool(
    function: ToolFn,
    args: Args,
    sample: Sample,
    call: ToolCall,
    *,
    known: Collection[str],
    timeout_s: float,
) -> tuple[Any, bool]:
    """Make one call: `function(args, sample, name, arguments)`, a coroutine function or a plain one (in a thread).

    Args:
        known: names that may be called; empty = any.
        timeout_s: longest time of the tool, from the moment at which its function begins. A plain function that takes
            longer loses the processes that it has started, and goes on in its thread, unheard.

    Returns:
        (text for the model, or content parts with images; whether the call succeeded).

    Raises:
        EnvError: the environment failed.
        RuntimeError: the tool function raised something else than `ToolError`; or as many calls as there are threads
            were given up and still hang.
    """
    if call.problem:
        return f"error: {call.problem}", False
    if known and call.name not in known:
        return f"error: no tool {call.name}; there is {', '.join(known)}", False
    if not inspect.iscoroutinefunction(function):
        _check_threads(args, timeout_s)
    try:
        result = await _run(function, args, sample, call, timeout_s)
    except ToolError as error:
        return f"error: {error}", False
    except CallTimeout:
        ToolThreads.num_timeouts += 1
        logger.warning("tool %s took more than %g s and was given up", call.name, timeout_s)
        return f"error: {call.name} took more than {timeout_s:g} s", False
    except TimeoutError:  # of what the tool itself waited for
        return f"error: {call.name} timed out", False
    except BaseException as error:
        if is_cancellation(error) or isinstance(error, EnvError):
            raise
        if isinstance(error, ConnectionError) or (isinstance(error, HttpError) and not error.is_refused):
            raise EnvError(f"tool {call.name}: {type(error).__name__}: {error}") from error
        raise RuntimeError(
            f"tool {call.name} with {json.dumps(call.arguments)[:200]} raised {type(error).__name__}: {error}; raise "
            "slime.rollout.multi_turn.ToolError where the model is at fault"
        ) from error
    return _content(result), True


def _content(result: Any) -> Any:
    """The content of a tool's message: its text, its parts where one is an image, else JSON."""
    is_ready = isinstance(result, str) or _are_parts(result)
    return result if is_ready else json.dumps(result, ensure_ascii=False, default=str)


def _are_parts(result: Any) -> bool:
    """Whether a tool answers with content parts, of which one is an image."""
    parts = [part.get("type") for part in result if isinstance(part, dict)] if isinstance(result, list) else []
    return len(parts) > 0 and len(parts) == len(result) and "image" in parts and {*parts} <= {"image", "text"}


def _check_threads(args: Args, timeout_s: float) -> None:
    threads = ToolThreads(args).threads
    if threads.num_lost >= threads.limit:
        raise RuntimeError(
            f"{threads.num_lost} tool calls that took more than {timeout_s:g} s still hang in their threads, as many "
            "as --tool-concurrency allows; give what the tool waits for a deadline, or run it as a process"
        )


async def _run(function: ToolFn, args: Args, sample: Sample, call: ToolCall, timeout_s: float) -> Any:
    given = (args, sample, call.name, call.arguments)
    if inspect.iscoroutinefunction(function):
        return await _in_time(function(*given), timeout_s)
    result = await ToolThreads(args).threads.run(function, *given, timeout_s=timeout_s)
    return await _in_time(result, timeout_s) if inspect.isawaitable(result) else result


async def _in_time(work: Awaitable[Any], timeout_s: float) -> Any:
    """What a coroutine returns; one that takes too long is cancelled, and left alone where it ignores that."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            raise CallTimeout
        return task.result()
    finally:
        if not task.done():
            await cancel_all([task])
