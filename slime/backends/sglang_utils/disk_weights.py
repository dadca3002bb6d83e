"""How an engine of ours loads a version of the weights from files: load format "slime" of /update_weights_from_disk.

SGLang's own formats differ in two ways that matter during training. A file that is cut short ends its scheduler: what
fails while loading is tried again from the same files, outside any `try`. And they prepare layers once more after
loading, which fp8 layers do not survive. Here the directory is looked at first, every byte of it, once for an engine
(or where the host's copy is made): what was changed on its way is not loaded. Weights are loaded as the other
transports load them, and whatever is wrong, on any tensor-parallel rank, is the answer of all. With "slime:DIR" the
host's own copy of the weights in DIR is brought to the version first, which may be a delta, and is loaded from: of a
delta the tensors that changed, and those without which SGLang would not load them. "slime-copy:DIR" only brings the
copy there, in the process that answers requests: the engine generates meanwhile, and a load finds it done.

It does not know who writes versions, nor when they go away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.backends.sglang_utils.local_checkpoint import LocalCheckpoint, RefusedError
from slime.utils import manifest
from slime.weights.names import with_partners
from slime.weights.safetensors_files import files_of, read_index, what_is_wrong

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LOAD_FORMAT = "slime"
COPY_FORMAT = "slime-copy"


def install() -> None:
    """Add the format to the server that runs in this process. Imports SGLang."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    stock = WeightUpdater.update_weights_from_disk

    def update_weights_from_disk(
        self: Any, model_path: str, load_format: str, *values: Any, **keywords: Any
    ) -> tuple[bool, str]:
        name, _, local_dir = str(load_format).partition(":")
        if name != LOAD_FORMAT:
            return stock(self, model_path, load_format, *values, **keywords)
        problem = load(Path(model_path), self.get_model().load_weights, Path(local_dir) if local_dir else None)
        return problem is None, problem or "Succeeded to update model weights."

    rename = TokenizerManager._update_model_path_info

    def stay_named(self: Any, model_path: str, load_format: str) -> None:
        if (
            str(load_format).partition(":")[0] != LOAD_FORMAT
        ):  # a version's directory goes away, and is not the name of the model
            rename(self, model_path, load_format)

    serve = TokenizerManager.update_weights_from_disk

    async def bring_copy_or_serve(self: Any, obj: Any, request: Any = None) -> tuple[bool, str, int]:
        name, _, local_dir = str(obj.load_format).partition(":")
        if name != COPY_FORMAT:
            served: tuple[bool, str, int] = await serve(self, obj, request)
            return served
        problem = await asyncio.to_thread(bring_copy, Path(obj.model_path), Path(local_dir))
        return problem is None, problem or "The copy of this host is of this version.", 0

    WeightUpdater.update_weights_from_disk = update_weights_from_disk
    TokenizerManager.update_weights_from_disk = bring_copy_or_serve
    TokenizerManager._update_model_path_info = stay_named


def load(
    directory: Path,
    load_weights: Callable[[Iterator[tuple[str, torch.Tensor]]], Any],
    local_dir: Path | None = None,
) -> str | None:
    """Load a version into the model, on every tensor-parallel rank at once.

    Args:
        directory: of the version.
        load_weights: takes (HF name, full tensor).
        local_dir: where this host has its own copy of the weights, which is brought to the version first.

    Returns:
        what is wrong, on this rank or on another; None when every rank has loaded all of it.
    """
    problem = agreed(_missing(directory) or what_is_wrong(directory))
    problem = problem or agreed(_changed(directory, local_dir))
    source = directory
    if problem is None and local_dir is not None:
        problem = agreed(_brought(directory, local_dir))
        source = LocalCheckpoint(local_dir).directory
    if problem is not None:
        return problem
    try:
        load_weights(tensors_of(source, with_partners(read_index(directory)["weight_map"])))
    except Exception as error:  # the answer, in place of the scheduler's end
        logger.exception("loading %s failed", directory)
        problem = f"loading {directory} failed: {type(error).__name__}: {error}"
    return agreed(problem)


def bring_copy(directory: Path, local_dir: Path) -> str | None:
    """Bring this host's own copy of the weights to a version.

    Returns:
        what is wrong; None when the copy is there.
    """
    return _missing(directory) or what_is_wrong(directory) or _brought(directory, local_dir)


def _brought(directory: Path, local_dir: Path) -> str | None:
    try:
        LocalCheckpoint(local_dir).bring_to(directory)
    except (RefusedError, OSError, ValueError, KeyError) as error:
        logger.exception("%s was refused", directory)
        return str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"
    return None


def _changed(directory: Path, local_dir: Path | None) -> str | None:
    """What of a version is not what was written; a host's copy is looked at when it is made."""
    if local_dir is not None or not _is_first():
        return None
    return manifest.what_is_wrong(directory / manifest.FILE)


def _missing(directory: Path) -> str | None:
    if directory.is_dir():
        return None
    return f"there is no {directory} on this host; is its parent the same directory as on the trainer's?"


def tensors_of(directory: Path, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, tensor) of these tensors of a directory, mapped from the files."""
    from safetensors import safe_open

    for file in files_of(directory):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                if name in names:
                    yield name, opened.get_tensor(name)


def _is_first() -> bool:
    """Whether this is the first tensor-parallel rank, or the only process."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return True
    from sglang.srt.distributed import get_tp_group

    return bool(get_tp_group().rank_in_group == 0)


def agreed(problem: str | None) -> str | None:
    """The first problem of a tensor-parallel rank, on all of them (collective)."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return problem
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return problem
    found: list[str | None] = [None] * group.world_size
    dist.all_gather_object(found, problem, group=group.cpu_group)
    return next(filter(None, found), None)
