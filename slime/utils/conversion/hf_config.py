"""The config.json of an HF directory that a flag names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.utils.errors import UsageError


def read_hf_config(path: str | Path, *, flag: str) -> dict[str, Any]:
    """Return the config.json of `path`.

    Raises:
        UsageError: there is none, or it is no JSON object; names the flag.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise UsageError(f"{flag} {path} is no HF checkpoint: it has no config.json.")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise UsageError(f"{file} is no JSON ({error}); download it again.") from error
    if not isinstance(config, dict):
        raise UsageError(f"{file} holds no JSON object; is it the config of a model?")
    return config
