"""Harnesses: programs that work on a task with a model's help, started in a sandbox against our server.

`make_harness("claude_code")` gives one by its name; docs/agent_harness.md lists them, and how to add another.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from slime.agent.harness.base import BaseHarness, HarnessContext
from slime.utils.errors import UsageError, did_you_mean
from slime.utils.misc import load_function

if TYPE_CHECKING:
    from slime.agent.harness.claude_code import ClaudeCodeHarness
    from slime.agent.harness.codex import CodexHarness
    from slime.agent.harness.mini_swe_agent import MiniSweAgentHarness
    from slime.agent.harness.opencode import OpenCodeHarness
    from slime.agent.harness.scripted import ScriptedHarness

__all__ = [
    "HARNESSES",
    "BaseHarness",
    "ClaudeCodeHarness",
    "CodexHarness",
    "HarnessContext",
    "MiniSweAgentHarness",
    "OpenCodeHarness",
    "ScriptedHarness",
    "make_harness",
]

HARNESSES = {
    "claude_code": "slime.agent.harness.claude_code:ClaudeCodeHarness",
    "codex": "slime.agent.harness.codex:CodexHarness",
    "mini_swe_agent": "slime.agent.harness.mini_swe_agent:MiniSweAgentHarness",
    "opencode": "slime.agent.harness.opencode:OpenCodeHarness",
    "scripted": "slime.agent.harness.scripted:ScriptedHarness",
}
"""Name -> where its class is; loaded when asked for."""


def __getattr__(name: str) -> Any:
    for path in HARNESSES.values():
        module, _, class_name = path.partition(":")
        if class_name == name:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def make_harness(name: str) -> BaseHarness:
    """Return the harness of that name, or of a class of the user's, named `package.module:Class`.

    Raises:
        UsageError: there is no such harness, or the class is not one.
    """
    if name not in HARNESSES and ":" not in name:
        raise UsageError(
            f"no agent harness is called {name!r}: {did_you_mean(name, HARNESSES)} There are"
            f" {', '.join(HARNESSES)}, or name a class of yours as package.module:Class"
        )
    try:
        kind = load_function(HARNESSES.get(name, name))
    except ImportError as error:
        raise UsageError(f"agent harness {name!r}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, BaseHarness)):
        raise UsageError(f"agent harness {name!r}: {kind!r} is not a subclass of slime.agent.harness.BaseHarness")
    return kind()
