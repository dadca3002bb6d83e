"""Servers that speak the protocols of OpenAI and Anthropic to agents; each is loaded at first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.agent.adapters.anthropic import AnthropicAdapter
    from slime.agent.adapters.common import BaseAdapter
    from slime.agent.adapters.openai import OpenAIAdapter

__all__ = ["AnthropicAdapter", "BaseAdapter", "OpenAIAdapter"]
_MODULES = {"AnthropicAdapter": "anthropic", "BaseAdapter": "common", "OpenAIAdapter": "openai"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
