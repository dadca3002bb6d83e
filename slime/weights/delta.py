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
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
"""uint8 [n]: the raw bytes of a tensor."""

ENCODINGS = ("xor", "overwrite")
CHECKSUMS = ("xxh3-128", "blake3", "adler32")
COMPRESSION = "zstd"
_LEVEL = 1
MAX_LISTED = (8, 2**20)
"""One element in so many, and of a small tensor as many as this: a list of more is not worth its room."""
_FRAME = 2**21
_GPU_PIECE = 2**25
"""Bytes: long enough for the link to the host, short enough to need little memory beside the weights."""
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_TORCH_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def parts_of(size: int, device: torch.device) -> list[slice]:
    """The pieces in which a tensor of `size` bytes, which lies on a device, is compared (multiples of a frame)."""
    step = _FRAME if device.type == "cpu" else _GPU_PIECE
    return [slice(start, min(size, start + step)) for start in range(0, size, step)] or [slice(0, 0)]


class Part(NamedTuple):
    """What differs in one of `parts_of`.

    Attributes:
        changed: elements.
        positions: of encoding overwrite, u4 of each, counted from the first element of the tensor.
        data: of xor compressed frames, of overwrite the new values.
    """

    changed: int
    positions: bytes
    data: bytes


def encode_part(old: torch.Tensor, new: torch.Tensor, start: int, *, itemsize: int, encoding: str) -> Part:
    """Find what differs, where `new` lies: of a GPU only that comes to the host.

    Args:
        old: uint8 [n], in host memory. new: likewise, anywhere.
        start: of this part in the tensor, in bytes.
        itemsize: bytes of an element.
        encoding: of `ENCODINGS`.

    Raises:
        ValueError: more elements than four bytes can count ("overwrite"), or an unknown encoding.
    """
    if encoding not in ENCODINGS:
        raise ValueError(f"{encoding!r} is no encoding of a delta; known are {', '.join(ENCODINGS)}")
    first = start // itemsize
    if encoding == "overwrite" and first + new.numel() // itemsize > np.iinfo(np.uint32).max:
        raise ValueError("a tensor has too many elements for encoding overwrite; use xor")
    if new.device.type == "cpu":
        before, after = _elements(old.numpy(), itemsize), _elements(new.numpy(), itemsize)
        if encoding == "xor":  # of one frame, in which it is found while it is compressed
            xor = np.bitwise_xor(before, after)
            return Part(int(np.count_nonzero(xor)), b"", _codec().compress(xor, asbytes=True))
        where = np.flatnonzero(before != after)
        return Part(where.size, (where + first).astype("<u4").tobytes(), after[where].tobytes())
    where, xor, values = _differences(old, new, itemsize)
    if encoding == "overwrite":
        return Part(where.size, (where + first).astype("<u4").tobytes(), values.tobytes())
    return Part(where.size, b"", frames_of(where, xor, new.numel() // itemsize))


def _differences(old: torch.Tensor, new: torch.Tensor, itemsize: int) -> tuple[Any, Any, Any]:
    """Where elements differ from those on a GPU, old ^ new of these, and what they are there; in host memory."""
    unit = _TORCH_UNITS[itemsize]
    before, after = old.to(new.device, non_blocking=True).view(unit), new.view(unit)
    where = torch.nonzero(before != after).view(-1)
    values = torch.stack([before[where] ^ after[where], after[where]]).cpu().numpy().view(_UNITS[itemsize])
    return where.cpu().numpy(), values[0], values[1]


def frames_of(where: npt.NDArray[Any], xor: npt.NDArray[Any], size: int) -> bytes:
    """Return the compressed frames of a part of `size` elements, of which those at `where` differ by `xor`."""
    step, frames = _FRAME // xor.itemsize, []
    frame = np.zeros(min(step, size), xor.dtype)  # one for all: new pages for each take as long as compressing
    for start in range(0, size, step):
        low, high = np.searchsorted(where, [start, start + step])
        places = where[low:high] - start
        frame[places] = xor[low:high]
        frames.append(_codec().compress(frame[: size - start], asbytes=True))
        frame[places] = 0
    return b"".join(frames)


def join(parts: Sequence[Part], encoding: str) -> bytes:
    """The delta of a tensor, from those of its parts in order."""
    data = b"".join(part.data for part in parts)
    if encoding == "xor":
        return data
    count = np.array([sum(part.changed for part in parts)], dtype="<u4").tobytes()
    found: bytes = _codec().compress(count + b"".join(part.positions for part in parts) + data, asbytes=True)
    return found


def encode(old: Bytes, new: Bytes, *, itemsize: int, encoding: str) -> tuple[bytes, int]:
    """(the delta from `old` to `new`, which are of one size; how many elements of `itemsize` bytes differ).

    Raises:
        ValueError: as of `encode_part`.
    """
    before, after = torch.from_numpy(old), torch.from_numpy(new)
    parts = [
        encode_part(before[part], after[part], part.start, itemsize=itemsize, encoding=encoding)
        for part in parts_of(new.size, after.device)
    ]
    return join(parts, encoding), sum(part.changed for part in parts)


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

    Attributes:
        found: (positions u4 [k], new values [k]) of each piece so far; None where more elements changed than a list
            of them is good for.

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
        self._room = max(size // itemsize // MAX_LISTED[0], MAX_LISTED[1])
        self.found: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] | None = []
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
        first = start // self._itemsize
        if self._positions is None or self._values is None:
            found = np.frombuffer(self._stream.read(part.size), np.uint8)
            if found.size != part.size:
                raise ValueError(f"it is of {start + found.size} bytes, for a tensor of {self._size}")
            np.bitwise_xor(part, found, out=part)
            if self.found is not None:
                where = np.flatnonzero(_elements(found, self._itemsize))
                self._list((where + first).astype("<u4"), _elements(part, self._itemsize)[where])
            return
        low, high = np.searchsorted(self._positions, [first, first + part.size // self._itemsize])
        where, values = self._positions[low:high], self._values[low:high]
        _elements(part, self._itemsize)[where - first] = values
        self._list(where, values)

    def _list(self, where: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        self._room -= where.size
        if self._room < 0:
            self.found = None
        elif self.found is not None:
            self.found.append((where, values))

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


def hasher(kind: str) -> Any:
    """What makes a digest of bytes that come one after the other: it has `update` and `hexdigest`, as of hashlib.

    Raises:
        ValueError: an unknown kind. ModuleNotFoundError: its package is not installed.
    """
    if kind == "xxh3-128":
        import xxhash

        return xxhash.xxh3_128()
    if kind == "blake3":
        import blake3

        return blake3.blake3()
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
    return str(made.hexdigest())


def _elements(data: Bytes, itemsize: int) -> npt.NDArray[Any]:
    return data.view(_UNITS[itemsize])


def _codec() -> Any:
    import pyarrow

    return pyarrow.Codec(COMPRESSION, compression_level=_LEVEL)


def raw_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, uint8 [n], where it lies; of a contiguous one no copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The same in host memory; of a tensor that is there already, no copy."""
    raw: Bytes = raw_of(tensor).cpu().numpy()
    return raw
