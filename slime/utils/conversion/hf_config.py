"""The config.json of an HF directory that a flag names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.utils.errors import UsageError


def read_hf_config(path: str | Path, *, flag: str) -> dict[str, Any]:
    """Return the config.json of `path`.

    Raises:
        UsageError: there is none, or it is no JSON object; names the flag.
    """
    file = Path(path) / "config.json"
    return read_config_file(file, missing=f"{flag} {path} is no HF checkpoint: it has no config.json.")


def read_config_file(file: Path, *, missing: str) -> dict[str, Any]:
    """Return the config in a file.

    Raises:
        UsageError: `missing` where there is no file, or it is no JSON object.
    """
    if not file.is_file():
        raise UsageError(missing)
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise UsageError(f"{file} is no JSON ({error}); download it again.") from error
    if not isinstance(config, dict):
        raise UsageError(f"{file} holds no JSON object; is it the config of a model?")
    return config


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a model that is not quantised; its language model may have one of its own."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(plain.get("text_config"), dict):
        plain["text_config"] = without_quantization(plain["text_config"])
    return plain
