"""What changed between two versions of a tensor, as few bytes, and how to make the one of the other again, bit by bit.

A delta is zstd-compressed (level 1), in one of two encodings of the raw bytes:

    xor        old ^ new; applied twice it gives the old version again. In frames of 2 MiB of a tensor, one after the
               other, so that threads can share the work of a large one, each with what fits into its caches
    overwrite  u4 count, u4 positions [count] of the elements that changed, their new values; it may be applied twice

A checksum of the new bytes says afterwards whether the result is what the sender had: it notices a delta that was
damaged, and one that was applied to something else. The module knows nothing about names, files or versions.

Example:
    >>> import numpy as np
    >>> old, new = np.zeros(8, np.uint8), np.array([0, 0, 0, 0, 7, 0, 0, 0], np.uint8)
    >>> delta, changed = encode(old, new, itemsize=4, encoding="overwrite")
    >>> changed
    1
    >>> decode(old, delta, itemsize=4, encoding="overwrite").tolist()
    [0, 0, 0, 0, 7, 0, 0, 0]
"""

from __future__ import annotations

import zlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
"""uint8 [n]: the raw bytes of a tensor."""

ENCODINGS = ("xor", "overwrite")
CHECKSUMS = ("xxh3-128", "blake3", "adler32")
COMPRESSION = "zstd"
_LEVEL = 1
_FRAME = 2**21
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def parts_of(size: int, encoding: str) -> list[slice]:
    """The pieces of a tensor of `size` bytes whose deltas, one after the other, are the delta of the whole."""
    step = _FRAME if encoding == "xor" else size
    return [slice(start, min(size, start + step)) for start in range(0, size, max(1, step))] or [slice(0, 0)]


def encode(old: Bytes, new: Bytes, *, itemsize: int, encoding: str) -> tuple[bytes, int]:
    """(the delta from `old` to `new`, which are of one size; how many elements of `itemsize` bytes differ).

    Raises:
        ValueError: more elements than four bytes can count ("overwrite"), or an unknown encoding.
    """
    parts = [
        encode_part(old[part], new[part], itemsize=itemsize, encoding=encoding)
        for part in parts_of(new.size, encoding)
    ]
    return b"".join(delta for delta, _ in parts), sum(changed for _, changed in parts)


def encode_part(old: Bytes, new: Bytes, *, itemsize: int, encoding: str) -> tuple[bytes, int]:
    """`encode` of one of `parts_of`."""
    before, after = _elements(old, itemsize), _elements(new, itemsize)
    if encoding == "xor":
        changes = np.bitwise_xor(before, after)
        return _codec().compress(changes, asbytes=True), int(np.count_nonzero(changes))
    if encoding != "overwrite":
        raise ValueError(f"{encoding!r} is no encoding of a delta; known are {', '.join(ENCODINGS)}")
    if after.size > np.iinfo(np.uint32).max:
        raise ValueError(f"a tensor of {after.size} elements has too many for encoding overwrite; use xor")
    positions = np.flatnonzero(before != after).astype("<u4")
    head = np.array([positions.size], dtype="<u4")
    raw = head.tobytes() + positions.tobytes() + after[positions].tobytes()
    return _codec().compress(raw, asbytes=True), positions.size


def decode(old: Bytes, delta: bytes, *, itemsize: int, encoding: str) -> Bytes:
    """The new version, from the old one and a delta; `old` stays what it is.

    Raises:
        ValueError: it is no delta to a tensor of this size.
    """
    new = np.array(old)
    changes = Changes(delta, new.size, itemsize=itemsize, encoding=encoding)
    changes.apply(0, new)
    changes.finish()
    return new


class Changes:
    """A delta that is applied to a tensor piece by piece, so that a large one needs no second copy in memory.

    Args:
        delta: of `encode`.
        size: bytes of the tensor.
        itemsize: bytes of an element.
        encoding: of the delta.

    Raises:
        ValueError: it is no delta to a tensor of this size; also of the methods.
    """

    def __init__(self, delta: bytes, size: int, *, itemsize: int, encoding: str) -> None:
        self._size = size
        self._itemsize = itemsize
        self._stream = _Decompressed(delta)
        self._positions = self._values = None
        if encoding == "overwrite":
            self._positions, self._values = self._overwritten()

    def _overwritten(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        raw = np.frombuffer(self._stream.read(None), np.uint8)
        count = int(raw[:4].view("<u4")[0]) if raw.size >= 4 else -1
        if count < 0 or raw.size != 4 + count * (4 + self._itemsize):
            raise ValueError(f"its {raw.size} bytes are not those of {max(count, 0)} elements of {self._itemsize}")
        positions = raw[4 : 4 + 4 * count].view("<u4")
        if count and int(positions.max()) >= self._size // self._itemsize:
            raise ValueError(f"it changes element {int(positions.max())} of {self._size // self._itemsize}")
        return positions, _elements(raw[4 + 4 * count :], self._itemsize)

    def apply(self, start: int, part: Bytes) -> None:
        """Change the bytes from `start` on in place; the parts come in order, each of whole elements."""
        if self._positions is None or self._values is None:
            found = np.frombuffer(self._stream.read(part.size), np.uint8)
            if found.size != part.size:
                raise ValueError(f"it is of {start + found.size} bytes, for a tensor of {self._size}")
            np.bitwise_xor(part, found, out=part)
            return
        first = start // self._itemsize
        low, high = np.searchsorted(self._positions, [first, first + part.size // self._itemsize])
        _elements(part, self._itemsize)[self._positions[low:high] - first] = self._values[low:high]

    def finish(self) -> None:
        """See whether the last part was the end."""
        if self._stream.read(1):
            raise ValueError(f"it is of more than the {self._size} bytes of the tensor")


class _Decompressed:
    """The bytes of a compressed delta, from the first to the last."""

    def __init__(self, data: bytes) -> None:
        import pyarrow

        self._stream = pyarrow.CompressedInputStream(pyarrow.BufferReader(data), COMPRESSION)

    def read(self, count: int | None) -> bytes:
        """The next bytes, fewer at the end; None: all that are left."""
        try:
            return bytes(self._stream.read(count))
        except OSError as error:
            raise ValueError(f"it cannot be decompressed: {error}") from None


class Hasher(Protocol):
    """Takes bytes one after the other."""

    def update(self, data: Any, /) -> Any:
        """Take some more."""

    def hexdigest(self) -> str:
        """Of all that were taken."""


def hasher(kind: str) -> Hasher:
    """What makes a digest of bytes that come one after the other.

    Raises:
        ValueError: an unknown kind. ModuleNotFoundError: its package is not installed.
    """
    if kind == "xxh3-128":
        import xxhash

        return xxhash.xxh3_128()
    if kind == "blake3":
        import blake3

        made: Hasher = blake3.blake3()
        return made
    if kind == "adler32":
        return _Adler32()
    raise ValueError(f"{kind!r} is no checksum; known are {', '.join(CHECKSUMS)}")


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def checksum(data: Bytes, kind: str) -> str:
    """A digest of the bytes, in hexadecimal; raises what `hasher` does."""
    made = hasher(kind)
    made.update(data)
    return made.hexdigest()


def _elements(data: Bytes, itemsize: int) -> npt.NDArray[Any]:
    return data.view(_UNITS[itemsize])


def _codec() -> Any:
    import pyarrow

    return pyarrow.Codec(COMPRESSION, compression_level=_LEVEL)


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The raw bytes of a tensor in host memory; of one that is there already, no copy."""
    raw: Bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw
