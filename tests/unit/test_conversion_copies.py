"""Bytes that a conversion takes over as they are: where they lie in both files, how they are copied and checked."""

from __future__ import annotations

import errno

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.megatron_utils.checkpoint import torch_dist_writer
from slime.backends.megatron_utils.checkpoint.torch_dist_reader import TorchDistReader
from slime.utils import manifest
from slime.utils.conversion import file_copy, raw_tensors
from slime.utils.conversion.file_copy import Segment, copy_into, range_in, tiles
from slime.utils.conversion.raw_tensors import RawTensors, TensorInfo
from slime.utils.errors import UsageError
from tests.unit.megatron_fakes import make_hf_model
from tests.unit.test_hf_weights import run_tool
from tools import convert_hf_to_torch_dist


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
    assert set(raw_tensors.NAMES) == set(raw_tensors.DTYPES.values())


def test_bytes_that_are_the_same_in_both_forms_are_found_and_copied(tmp_path, monkeypatch):
    whole = torch.empty(6, 4, dtype=torch.bfloat16, device="meta")
    gate, up = whole.chunk(2)
    assert (range_in(gate, whole), range_in(up, whole)) == ((0, 24), (24, 48))
    assert range_in(whole[1:3], whole) == (8, 24)
    for other in (whole[:, :2], whole.T, whole.clone(), torch.cat([up, gate])):
        assert range_in(other, whole) is None
    (tmp_path / "a").write_bytes(bytes(range(24)))
    (tmp_path / "b").write_bytes(bytes(range(100, 130)))
    pieces = [(24, 48, Segment(tmp_path / "b", 5, 24)), (0, 24, Segment(tmp_path / "a", 0, 24))]
    expected = bytes(range(24)) + bytes(range(105, 129))
    assert tiles(pieces[:1], 0, 48) is None and tiles(pieces, 0, 49) is None
    wanted = [(0, 48), (4, 30), (24, 48)]
    for in_kernel in (True, False):
        if not in_kernel:
            monkeypatch.setattr(file_copy, "_PIECE", 7)

            def refuse(*values: object) -> int:
                raise OSError(errno.EXDEV, "other file systems")

            monkeypatch.setattr(file_copy.os, "copy_file_range", refuse)
        for start, stop in wanted:
            found = tiles(pieces, start, stop)
            assert found is not None
            with (tmp_path / "out").open("wb") as out:
                copy_into(found, out.fileno(), 3)
            assert (tmp_path / "out").read_bytes() == b"\0\0\0" + expected[start:stop]
    with (tmp_path / "out").open("wb") as out, pytest.raises(UsageError, match="a is cut off"):
        copy_into([Segment(tmp_path / "a", 20, 8)], out.fileno(), 0)


def test_a_checksum_is_of_the_bytes_that_went_into_the_file(tmp_path):
    """A part with values that are made, values that are copied out of two files, and values of no length."""
    values = torch.arange(1000, dtype=torch.int16)
    data = bytes(raw_tensors.bytes_of(values))
    (tmp_path / "a").write_bytes(b"xx" + data[:900])
    (tmp_path / "b").write_bytes(data[900:])
    places = [Segment(tmp_path / "a", 2, 900), Segment(tmp_path / "b", 0, 1100)]
    with (tmp_path / "part").open("w+b") as file:
        stream = torch_dist_writer.HashedStream(file)
        torch_dist_writer._save(values[::2], (500,), stream)
        start = stream.tell()
        torch_dist_writer._save_from(places, (1000,), torch.int16, stream)
        end = stream.tell()
        torch_dist_writer._save(values[:0], (0,), stream)
    assert stream.entry() == manifest.entries_of(tmp_path, [tmp_path / "part"])["part"]
    (tmp_path / "one").write_bytes((tmp_path / "part").read_bytes()[start:end])
    assert torch.equal(torch.load(tmp_path / "one"), values)


def test_what_megatron_keeps_as_hf_has_it_is_copied_and_not_made(tmp_path):
    make_hf_model(tmp_path / "hf", "qwen3_moe")
    command = ["--hf-checkpoint", f"{tmp_path}/hf", "--save", f"{tmp_path}/dist", "--model-args-from-hf"]
    run_tool(convert_hf_to_torch_dist, *command)
    reader = TorchDistReader(tmp_path / "dist" / "release")
    for name, info in reader.infos().items():
        found = reader.segments(name, 0, info.num_bytes)
        assert found is not None, name
        stored = b"".join(one.path.read_bytes()[one.offset : one.offset + one.num_bytes] for one in found)
        assert stored == bytes(raw_tensors.bytes_of(reader.read(name).contiguous())), name
