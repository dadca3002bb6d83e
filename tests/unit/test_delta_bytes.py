"""The bytes of a delta: exact in both encodings, small where little changed, and noticed where they are damaged."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from slime.weights.delta import CHECKSUMS, ENCODINGS, bytes_of, checksum, decode, encode, frames_of, parts_of

INSTALLED = [kind for kind in CHECKSUMS if kind != "blake3" or importlib.util.find_spec("blake3")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@st.composite
def pairs(draw: Any) -> tuple[Any, Any, int]:
    """(old bytes, new bytes, bytes of an element): equal but for some elements."""
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    size = draw(st.integers(0, 64)) * itemsize
    old, noise = (draw(arrays.arrays(np.uint8, size)) for _ in range(2))
    keeps = np.repeat(draw(arrays.arrays(np.bool_, size // itemsize)), itemsize)
    return old, np.where(keeps, old, noise), itemsize


@given(pairs(), st.sampled_from(ENCODINGS))
def test_what_comes_out_is_what_went_in_bit_by_bit(pair: tuple[Any, Any, int], encoding: str) -> None:
    old, new, itemsize = pair
    before = old.copy()
    delta, changed = encode(old, new, itemsize=itemsize, encoding=encoding)
    assert decode(old, delta, itemsize=itemsize, encoding=encoding).tobytes() == new.tobytes()
    assert old.tobytes() == before.tobytes()
    rows = zip(old.reshape(-1, itemsize).tolist(), new.reshape(-1, itemsize).tolist(), strict=True)
    assert changed == sum(one != other for one, other in rows)


@given(pairs(), st.sampled_from(ENCODINGS), st.data())
def test_a_damaged_delta_never_passes_for_the_right_one(pair: Any, encoding: str, data: Any) -> None:
    old, new, itemsize = pair
    delta = bytearray(encode(old, new, itemsize=itemsize, encoding=encoding)[0])
    place = data.draw(st.integers(0, len(delta) - 1))
    delta[place] ^= data.draw(st.integers(1, 255))
    cut = bytes(delta[: data.draw(st.integers(0, len(delta)))])
    try:
        found = decode(old, cut, itemsize=itemsize, encoding=encoding)
    except ValueError:
        return
    is_same = found.tobytes() == new.tobytes()
    assert (checksum(found, "xxh3-128") == checksum(new, "xxh3-128")) == is_same


def test_xor_undoes_itself_and_overwrite_may_be_applied_twice() -> None:
    old, new = np.arange(8, dtype=np.uint8), np.arange(8, dtype=np.uint8) + 3
    xor, overwrite = (encode(old, new, itemsize=2, encoding=encoding)[0] for encoding in ENCODINGS)
    assert decode(new, xor, itemsize=2, encoding="xor").tobytes() == old.tobytes()
    assert decode(new, overwrite, itemsize=2, encoding="overwrite").tobytes() == new.tobytes()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_thousandth_of_the_elements_takes_a_hundredth_of_the_bytes(encoding: str) -> None:
    weights = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    changed = weights.clone()
    changed.view(-1)[::1000] *= 1.01
    old, new = bytes_of(weights), bytes_of(changed)
    delta, changed = encode(old, new, itemsize=2, encoding=encoding)
    assert 900 < changed <= 1000 and len(delta) < old.size / 100


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_tensor_of_several_frames_is_one_delta(encoding: str) -> None:
    old = np.zeros(2**22 + 6, np.uint8)
    new = old.copy()
    new[[0, 2**21 - 1, 2**21, 2**22 + 5]] = 1
    delta, changed = encode(old, new, itemsize=2, encoding=encoding)
    assert changed == 4 and np.array_equal(decode(old, delta, itemsize=2, encoding=encoding), new)
    assert [part.stop - part.start for part in parts_of(old.size, torch.device("cpu"))] == [2**21, 2**21, 6]
    with pytest.raises(ValueError, match="it (is of more than|changes element)"):
        decode(old[2:], delta, itemsize=2, encoding=encoding)


def test_frames_of_what_a_gpu_found_are_those_of_whole_bytes() -> None:
    old = np.zeros(2**21 + 10, np.uint16)  # two frames and ten elements
    new = old.copy()
    where = np.array([0, 3, 2**20 - 1, 2**20, 2**21, 2**21 + 9])
    new[where] = np.arange(1, 7)
    whole, changed = encode(old.view(np.uint8), new.view(np.uint8), itemsize=2, encoding="xor")
    assert changed == 6 and frames_of(where, new[where], new.size) == whole


def test_checksums_are_the_known_ones() -> None:
    data = np.frombuffer(b"Wikipedia", np.uint8)
    assert checksum(data, "adler32") == "11e60398", "the example of Wikipedia's article"
    assert checksum(data, "xxh3-128") == xxhash.xxh3_128(b"Wikipedia").hexdigest()
    with pytest.raises(ValueError, match="'md5' is no checksum; known are xxh3-128"):
        checksum(data, "md5")


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_a_tensor_are_its_own_whatever_its_strides(dtype: torch.dtype) -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3).t().to(dtype)
    again = torch.from_numpy(bytes_of(tensor).copy()).view(dtype).view(3, 2)
    assert torch.equal(again.float(), tensor.float())
