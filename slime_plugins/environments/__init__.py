"""Environments of verifiers, OpenEnv and reasoning-gym, each in a process with a virtual environment of its own.

`--custom-generate-function-path slime_plugins.environments.generate` runs them (docs/environments.md).
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "generate":  # at first use: server.py's tests and tools need nothing of slime's
        return importlib.import_module("slime_plugins.environments.rollout").generate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
