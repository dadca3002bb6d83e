"""Which flags hold secrets, by their names, and values with those replaced: for everything that shows flags.

It errs on the side of hiding. It does not look at values: a secret under another name is shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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


def _shown(name: str, value: Any) -> Any:
    if is_secret(name) and value not in (None, "", False, [], ()):
        return HIDDEN
    if isinstance(value, Mapping):
        return without_secrets({str(key): inner for key, inner in value.items()})
    return value
