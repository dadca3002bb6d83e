"""The harness of Codex: `slime.agent.harness.programs`, under its public path."""

from slime.agent.harness.programs import CodexHarness

__all__ = ["CodexHarness"]
