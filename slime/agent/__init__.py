"""Agents: sessions, protocols, sandboxes. `slime.agent.generate` is a ready generate function (docs/agents.md)."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "generate":  # at first use: the package itself needs next to nothing
        from slime.agent.settings import check_args

        generate = importlib.import_module("slime.agent.rollout").generate
        generate.check_args = check_args
        return generate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
