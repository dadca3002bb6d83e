"""Environment variables that say yes or no. It knows none of their names."""

from __future__ import annotations

from collections.abc import Mapping

from slime.utils.errors import UsageError


def env_flag(environment: Mapping[str, str], name: str, *, default: str = "false") -> bool:
    """Whether a variable says yes: true or 1, false, 0 or nothing, in any case.

    Raises:
        UsageError: it says something else.
    """
    value = environment.get(name, default).strip().lower()
    if value not in ("true", "1", "false", "0", ""):
        raise UsageError(f"{name}={value}: write true or 1, false or 0")
    return value in ("true", "1")
