"""What kind of checkpoint a directory is, and where an iteration lies inside it.

It reads names and one small text file; it opens no tensors and knows nothing about Megatron or transformers. Layout of
a Megatron checkpoint root: `latest_checkpointed_iteration.txt` (a number, or the word "release"), `iter_0000012/` or
`release/`, and `rollout/` with the states of the data source.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from slime.utils.errors import UsageError

TRACKER_FILE = "latest_checkpointed_iteration.txt"
MODEL_SHAPE_FILE = "model_shape.json"
STATE_MANIFEST = "data_source.manifest.json"
"""In an iteration: the manifest of the data source's state that belongs to it, with paths from the iteration's."""
RELEASE = "release"
"""Name of a checkpoint that holds weights only and belongs to no iteration (a converted HF model)."""


def classify_checkpoint(path: str | Path | None) -> Literal["megatron", "hf"] | None:
    """Return "megatron" for a root with a tracker file, "hf" for a directory with config.json, else None."""
    if path is None:
        return None
    if os.path.isfile(Path(path) / TRACKER_FILE):  # Path.is_file raises where the name is too long
        return "megatron"
    return "hf" if os.path.isfile(Path(path) / "config.json") else None


def read_tracker(path: str | Path) -> str | None:
    """Return what the tracker file of a checkpoint root says ("12" or "release"), or None if there is none.

    Raises:
        UsageError: when the file holds neither a number nor "release".
    """
    tracker = Path(path) / TRACKER_FILE
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    if text != RELEASE and not re.fullmatch(r"\d+", text):
        raise UsageError(
            f"{tracker} holds {text!r}, neither an iteration number nor 'release'; "
            "write the number of an existing iter_* directory."
        )
    return text


def latest_iteration(path: str | Path) -> int | None:
    """Return the newest iteration of a checkpoint root; None for a release and for no Megatron checkpoint at all."""
    text = read_tracker(path)
    return None if text in (None, RELEASE) else int(text)


def iteration_dir(root: str | Path, iteration: int | str) -> Path:
    """Return the directory of one iteration: `<root>/iter_0000012`, or `<root>/release` for the word "release"."""
    return Path(root) / (RELEASE if iteration == RELEASE else f"iter_{int(iteration):07d}")


def state_path(root: str | Path, rollout_id: int) -> Path:
    """Where the state of the data source after a rollout lies under --save / --load."""
    return Path(root) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"


def manifest_of_state(path: Path) -> Path:
    """Where the size and the checksum of a state are noted."""
    return path.with_suffix(".manifest.json")


def resolve_checkpoint_dir(root: str | Path, step: int | None = None) -> tuple[Path, int | None]:
    """Return (directory, iteration) of what a load from `root` would read; the iteration of a release is None.

    Args:
        root: a Megatron checkpoint root.
        step: take this iteration instead of the newest.

    Raises:
        UsageError: when there is no such checkpoint; names the iterations that exist.
    """
    wanted: int | str | None = step if step is not None else read_tracker(root)
    if wanted is None:
        raise UsageError(f"{root} is no Megatron checkpoint: it has no {TRACKER_FILE}.")
    directory = iteration_dir(root, wanted)
    if not directory.is_dir():
        there = sorted(p.name for p in Path(root).glob("iter_*")) + [p.name for p in Path(root).glob(RELEASE)]
        raise UsageError(f"{directory} does not exist; {root} holds {', '.join(there) or 'no checkpoint'}.")
    return directory, None if wanted == RELEASE else int(wanted)
