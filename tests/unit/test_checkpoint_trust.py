"""A Megatron checkpoint in which a file names code: loading it is refused, and the code is not run."""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slime.utils.errors import UsageError
from tests.unit.megatron_fakes import make_args, make_hf_model, run_world
from tests.unit.test_checkpoint import FLAGS, RUN, build
from tests.unit.test_untrusted_files import RunsCode

pytestmark = pytest.mark.processes


def in_metadata(directory: Path, code: RunsCode) -> None:
    path = directory / ".metadata"
    path.write_bytes(pickle.dumps(replace(pickle.loads(path.read_bytes()), planner_data=code)))


def in_common_state(directory: Path, code: RunsCode) -> None:
    path = directory / "common.pt"
    torch.save(torch.load(path, weights_only=True) | {"code": code}, path)


def in_object(directory: Path, code: RunsCode) -> None:
    """In the random states, which lie between the tensors; written behind everything else."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn.startswith("rng_state"))
    place = metadata.storage_data[index]
    file, crafted = directory / place.relative_path, io.BytesIO()
    torch.save({"python": code}, crafted)
    offset, length = file.stat().st_size, len(crafted.getvalue())
    file.write_bytes(file.read_bytes() + crafted.getvalue())
    metadata.storage_data[index] = replace(place, offset=offset, length=length)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def load_crafted(args, root):
    """Each rank is refused with the file or the object, and nothing is run."""
    from slime.backends.megatron_utils.checkpoint.iterations import (
        CheckpointSource,
        begin_checkpoint,
        load_checkpoint,
        load_weights,
        save_weights,
    )

    state, rank, marker = build(args), torch.distributed.get_rank(), root / "marker"
    everything = {"model": state.model, "optimizer": state.optimizer, "scheduler": state.scheduler}
    crafts = (
        (in_metadata, r"\.metadata names pathlib\.Path\.touch|\.metadata names builtins\.getattr"),
        (in_common_state, r"common\.pt holds more than tensors"),
        (in_object, r"iter_\w+: rng_state\S* holds more than tensors"),
    )
    for number, (craft, refusal) in enumerate(crafts):
        directory = begin_checkpoint(root, number, **everything).finish()
        assert load_checkpoint(CheckpointSource(str(root)), **everything) == number
        torch.distributed.barrier()
        if rank == 0:
            craft(directory, RunsCode(marker))
        torch.distributed.barrier()
        with pytest.raises(UsageError, match=refusal):
            load_checkpoint(CheckpointSource(str(root)), **everything)
    save_weights(root / "reference", state.model)
    if rank == 0:
        in_metadata(root / "reference", RunsCode(marker))
    torch.distributed.barrier()
    with pytest.raises(UsageError, match=crafts[0][1]):
        load_weights(root / "reference", state.model)
    assert not marker.exists()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_that_would_run_code_is_refused_on_every_rank(tmp_path: Path, world_size: int) -> None:
    make_hf_model(tmp_path / "hf")
    run_world(world_size, load_crafted, make_args(tmp_path / "hf", FLAGS, **RUN), tmp_path)
