"""Bytes of a conversion: how stored tensors are read, and what the checksum of a written file is of."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.megatron_utils.checkpoint import torch_dist_writer
from slime.checkpoints.paths import entries_of
from slime.conversion import reader
from slime.conversion.reader import RawTensors, TensorInfo
from slime.utils.errors import UsageError


def test_tensors_are_read_where_rows_and_dtypes_say(tmp_path):
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "fp8": torch.arange(8).float().to(torch.float8_e4m3fn),
        "rows": torch.arange(12).reshape(4, 3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    raw = RawTensors(tmp_path)
    for name, tensor in tensors.items():
        assert raw.info(name) == TensorInfo(tensor.dtype, tuple(tensor.shape))
        assert torch.equal(raw.read(name).float(), tensor.float())
    assert raw.read("rows", (1, 3)).tolist() == [[3, 4, 5], [6, 7, 8]]
    with pytest.raises(UsageError, match="no tensor other"):
        raw.read("other")
    assert set(reader.NAMES) == set(reader.DTYPES.values())


def test_a_checksum_is_of_the_bytes_that_went_into_the_file(tmp_path):
    """A part with values that are a view, values that are whole, and values of no length."""
    values = torch.arange(1000, dtype=torch.int16)
    with (tmp_path / "part").open("wb") as file:
        stream = torch_dist_writer.HashedStream(file)
        torch_dist_writer.save_tensor(values[::2], (500,), stream)
        start = stream.tell()
        torch_dist_writer.save_tensor(values, (1000,), stream)
        end = stream.tell()
        torch_dist_writer.save_tensor(values[:0], (0,), stream)
    assert stream.entry() == entries_of(tmp_path, [tmp_path / "part"])["part"]
    (tmp_path / "one").write_bytes((tmp_path / "part").read_bytes()[start:end])
    assert torch.equal(torch.load(tmp_path / "one"), values)
