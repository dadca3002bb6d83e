"""The contract's name for the pieces that harnesses share."""

from slime.agent.harness.base import install_node22, install_npm_cli, run_agent

__all__ = ["install_node22", "install_npm_cli", "run_agent"]
