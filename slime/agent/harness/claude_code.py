"""The harness of Claude Code: `slime.agent.harness.programs`, under its public path."""

from slime.agent.harness.programs import ClaudeCodeHarness

__all__ = ["ClaudeCodeHarness"]
