"""Read torch_dist checkpoints as data: nothing that a file names is run.

torch (2.13) unpickles .metadata, and with weights_only=False the objects between the tensors (random states, extra
states of layers); Megatron reads with both. It can go when torch reads them with weights_only.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slime.checkpoints.paths import check_names, read_metadata
from slime.checkpoints.rollout_files import reason_of
from slime.utils.errors import UsageError


def apply() -> None:
    """Replace how torch's reader reads .metadata and how its planner reads objects."""
    from megatron.core.msc_utils import MultiStorageClientFeature
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
    from torch.distributed.checkpoint._traverse import set_element
    from torch.distributed.checkpoint.metadata import StorageMeta

    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As upstream's, for the one file that a checkpoint of all ranks has."""
        metadata = read_metadata(Path(self.path))
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
        """As upstream's, for an object that is plain data."""
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise UsageError(
                f"{name} holds more than tensors and plain data, and loading that runs code: do not trust this "
                f"checkpoint ({reason_of(error)})."
            ) from error
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded

    # Where that package is installed, Megatron would read local files by it, and with a reader of its own.
    MultiStorageClientFeature.disable()
    FileSystemReader.read_metadata = read
    DefaultLoadPlanner.load_bytes = load_bytes


@contextmanager
def loading(directory: Path) -> Iterator[None]:
    """Load from a checkpoint directory inside the block; every rank enters it.

    Raises:
        UsageError: it holds what would be run; names the file, or the directory and the object, and the class.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{directory / 'common.pt'} holds more than tensors and plain data, and loading that runs code: do not "
            f"trust this checkpoint ({reason_of(error)})."
        ) from error
    except CheckpointException as error:
        check_names(directory)  # of a .metadata that was refused, torch leaves the text alone
        # every rank has the errors of all
        refusals = [found for found, _ in error.failures.values() if isinstance(found, UsageError)]
        if not refusals:
            raise
        raise UsageError(f"{directory}: {refusals[0]}") from error
