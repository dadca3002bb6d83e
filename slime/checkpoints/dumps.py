"""Files of a run that are written to be looked at or replayed later: writing, reading and saying what is wrong.

A dump is a dict that torch.save wrote. It is written under another name first, so that a run that is killed leaves no
half of one. What stands in a dump, its writer knows (slime.ray.rollout.manager, slime.training.reports); samples of a
rollout are read here, for a dump of another kind is the mistake to be expected.
"""

from __future__ import annotations

import logging
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

from slime.processes.directories import open_new
from slime.utils.errors import UsageError, line_of_full_disk
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def save_dump(path: str | Path, data: dict[str, Any]) -> None:
    """Write a dump and the directories above it; numpy arrays become tensors, which can be read without trust.

    Only this user can read and write it: it holds prompts and answers, and whoever loads one with trust runs its code.
    One for which the disk has no room is left out, and an error says so: no run depends on it.
    """
    import torch

    target = Path(path)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_new(unfinished) as file:  # torch's own says of a full disk only that it could not write
            torch.save(_plain(data), file)
        unfinished.replace(target)
    except (OSError, RuntimeError) as error:
        if (problem := line_of_full_disk(error)) is None:
            raise
        logger.error("%s is not written (%s); the run goes on without it", target, problem)
    finally:
        unfinished.unlink(missing_ok=True)


def load_dump(
    path: str | Path, *, trusted: bool = False, remedy: str = "trust it, or do not open it"
) -> dict[str, Any]:
    """Read a dump onto the CPU.

    Args:
        path: the file.
        trusted: where it holds objects other than tensors and plain data (images, what user code put on its samples),
            make them, which runs code that the file names. Without it such a file is refused.
        remedy: what the user can do about that, for the error.

    Raises:
        UsageError: there is no such file, it is no dump, or it would have to be trusted.
    """
    import torch

    if not os.path.isfile(path):
        raise UsageError(f"there is no file {path}")
    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        if not zipfile.is_zipfile(path) or not isinstance(error, pickle.UnpicklingError):
            raise UsageError(f"{path} is no dump: torch.load cannot read it") from error
        if not trusted:
            raise UsageError(
                f"{path} holds more than tensors and plain data, and reading that runs code: {remedy} "
                f"({reason_of(error)})"
            ) from error
        logger.warning("%s holds more than tensors and plain data: it is read as a file of your own", path)
        # the caller trusts it
        found = torch.load(path, weights_only=False, map_location="cpu")  # nosec B614
    if not isinstance(found, dict):
        raise UsageError(f"{path} is no dump: it holds a {type(found).__name__}, not a dict")
    return found


def load_samples(path: str | Path, *, option: str) -> list[Sample]:
    """The samples of a file that --save-debug-rollout-data wrote.

    Args:
        path: the file; what it holds is trusted.
        option: the flag that named it, for the error.

    Raises:
        UsageError: there is no such file, or it is no dump of a rollout.
    """
    try:
        dump = load_dump(path, trusted=True)
    except UsageError as error:
        raise UsageError(f"{option}: {error}; dump it with --save-debug-rollout-data") from error
    samples = dump.get("samples")
    if not isinstance(samples, list) or "dp_shards" in dump:
        raise UsageError(f"{option}: {path} is no dump of a rollout's samples (--save-debug-rollout-data)")
    return [Sample.from_dict(sample) for sample in samples]


def subsample(samples: list[Sample], share: float | None) -> list[Sample]:
    """A share of the samples, half of it from each end; all where `share` is None.

    Example:
        >>> subsample(list("abcdefgh"), 0.5)
        ['a', 'b', 'g', 'h']
    """
    if share is None:
        return samples
    wanted = max(1, int(len(samples) * share))
    head = wanted // 2
    return samples[:head] + samples[len(samples) - (wanted - head) :]


def _plain(value: Any) -> Any:
    """The same data without numpy: arrays as tensors, scalars as Python's."""
    import numpy as np
    import torch

    if isinstance(value, dict) and type(value) is dict:
        return {key: _plain(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        # token lists are long and hold only numbers: they are looked at, not rebuilt
        if all(type(entry) in (int, float, str, bool) for entry in value):
            return value
        return type(value)(_plain(entry) for entry in value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(np.ascontiguousarray(value))
    return value.item() if isinstance(value, np.generic) else value


def reason_of(error: Exception) -> str:
    """The line of torch's long message that names the type."""
    lines = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line]
    return lines[0] if lines else type(error).__name__
