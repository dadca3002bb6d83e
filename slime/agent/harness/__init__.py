"""Harnesses: programs that work on a task with a model's help, started in a sandbox against our server.

`make_harness("claude_code")` gives one by its name; docs/agent_harness.md lists them, and how to add another.
"""

from __future__ import annotations

from slime.agent.harness.base import BaseHarness, HarnessContext
from slime.agent.harness.programs import (
    ClaudeCodeHarness,
    CodexHarness,
    MiniSweAgentHarness,
    OpenCodeHarness,
    ScriptedHarness,
)
from slime.utils.errors import UsageError, did_you_mean
from slime.utils.misc import load_function

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

HARNESSES: dict[str, type[BaseHarness]] = {
    kind.name: kind
    for kind in (ClaudeCodeHarness, CodexHarness, MiniSweAgentHarness, OpenCodeHarness, ScriptedHarness)
}


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
        kind = HARNESSES.get(name) or load_function(name)
    except ImportError as error:
        raise UsageError(f"agent harness {name!r}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, BaseHarness)):
        raise UsageError(f"agent harness {name!r}: {kind!r} is not a subclass of slime.agent.harness.BaseHarness")
    return kind()
