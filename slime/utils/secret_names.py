"""Which flags hold secrets, by their names, and values with those replaced: for everything that shows flags.

It errs on the side of hiding. It does not look at values: a secret under another name is shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from slime.utils.api_keys import HIDDEN

_SECRET = re.compile(
    r"(^|_)(api_?keys?|access_?keys?|wandb_key|passwords?|passwd|secrets?|credentials?|auth_token)($|_)"
)
_PATHS = ("_path", "_file", "_dir")


def is_secret(name: str) -> bool:
    """Whether a flag (`--sglang-api-key`, `sglang_api_key`) holds a secret; paths and switches do not."""
    plain = name.lstrip("-").replace("-", "_").lower()
    return bool(_SECRET.search(plain)) and not plain.endswith((*_PATHS, "_per_run"))


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which the values of secret flags, also inside dictionaries, are `***`."""
    return {name: _shown(name, value) for name, value in values.items()}


def command_line_without_secrets(words: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """A copy of a command line in which what follows secret flags, and the values of secret flags, are `***`.

    Args:
        words: of the command line.
        values: what was parsed: a flag may be written short, or stand in JSON.

    Example:
        >>> command_line_without_secrets(["--lr", "1", "--wandb-k=x", "--api-key", "y"], {"wandb_key": "x"})
        ['--lr', '1', '--wandb-k=***', '--api-key', '***']
    """
    secrets = sorted(_secrets(values), key=len, reverse=True)
    shown, hides_next = [], False
    for word in words:
        if not word.startswith("--"):
            shown.append(HIDDEN if hides_next else _masked(word, secrets))  # some flags take several
            continue
        name, equals, value = word.partition("=")
        hides_next = is_secret(name) and not equals
        value = HIDDEN if is_secret(name) else _masked(value, secrets)
        shown.append(f"{name}={value}" if equals else name)
    return shown


def _masked(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def _secrets(values: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _secrets({str(key): inner for key, inner in value.items()})
        elif is_secret(name):
            found |= {str(one) for one in (value if isinstance(value, list | tuple) else [value]) if one}
    return found


def _shown(name: str, value: Any) -> Any:
    if is_secret(name) and value not in (None, "", False, [], ()):
        return HIDDEN
    if isinstance(value, Mapping):
        return without_secrets({str(key): inner for key, inner in value.items()})
    return value
