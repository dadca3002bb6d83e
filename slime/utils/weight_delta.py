"""What changed between two versions of a tensor, as few bytes, and how to make the one of the other again, bit by bit.

A delta is zstd-compressed (level 1), in one of two encodings of the raw bytes:

    xor        old ^ new; applied twice it gives the old version again
    overwrite  u4 count, u4 positions [count] of the elements that changed, their new values; it may be applied twice

A checksum of the new bytes says afterwards whether the result is what the sender had: it notices a delta that was
damaged, and one that was applied to something else. The module knows nothing about names, files or versions.

Example:
    >>> import numpy as np
    >>> old, new = np.zeros(8, np.uint8), np.array([0, 0, 0, 0, 7, 0, 0, 0], np.uint8)
    >>> delta = encode(old, new, itemsize=4, encoding="overwrite")
    >>> decode(old, delta, itemsize=4, encoding="overwrite").tolist()
    [0, 0, 0, 0, 7, 0, 0, 0]
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
"""uint8 [n]: the raw bytes of a tensor."""

ENCODINGS = ("xor", "overwrite")
CHECKSUMS = ("xxh3-128", "blake3", "adler32")
COMPRESSION = "zstd"
_LEVEL = 1
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def num_changed(old: Bytes, new: Bytes, *, itemsize: int) -> int:
    """How many elements of `itemsize` bytes differ."""
    return int(np.count_nonzero(_elements(old, itemsize) != _elements(new, itemsize)))


def encode(old: Bytes, new: Bytes, *, itemsize: int, encoding: str) -> bytes:
    """The delta from `old` to `new`, which are of one size.

    Raises:
        ValueError: more elements than four bytes can count ("overwrite"), or an unknown encoding.
    """
    if encoding == "xor":
        return _codec().compress(np.bitwise_xor(old, new), asbytes=True)
    if encoding != "overwrite":
        raise ValueError(f"{encoding!r} is no encoding of a delta; known are {', '.join(ENCODINGS)}")
    before, after = _elements(old, itemsize), _elements(new, itemsize)
    if after.size > np.iinfo(np.uint32).max:
        raise ValueError(f"a tensor of {after.size} elements has too many for encoding overwrite; use xor")
    positions = np.flatnonzero(before != after).astype("<u4")
    head = np.array([positions.size], dtype="<u4")
    return _codec().compress(head.tobytes() + positions.tobytes() + after[positions].tobytes(), asbytes=True)


def decode(old: Bytes, delta: bytes, *, itemsize: int, encoding: str) -> Bytes:
    """The new version, from the old one and a delta; `old` stays what it is.

    Raises:
        ValueError: it is no delta to a tensor of this size.
    """
    raw = np.frombuffer(_decompress(delta), np.uint8)
    if encoding == "xor":
        if raw.size != old.size:
            raise ValueError(f"it is of {raw.size} bytes, for a tensor of {old.size}")
        return np.bitwise_xor(old, raw)
    count = int(raw[:4].view("<u4")[0]) if raw.size >= 4 else -1
    if count < 0 or raw.size != 4 + count * (4 + itemsize):
        raise ValueError(f"its {raw.size} bytes are not those of {max(count, 0)} elements of {itemsize}")
    positions = raw[4 : 4 + 4 * count].view("<u4")
    new = np.array(old)
    elements = _elements(new, itemsize)
    if count and int(positions.max()) >= elements.size:
        raise ValueError(f"it changes element {int(positions.max())} of {elements.size}")
    elements[positions] = _elements(raw[4 + 4 * count :], itemsize)
    return new


def checksum(data: Bytes, kind: str) -> str:
    """A digest of the bytes, in hexadecimal.

    Raises:
        ValueError: an unknown kind. ModuleNotFoundError: its package is not installed.
    """
    raw: Any = data
    if kind == "xxh3-128":
        import xxhash

        return xxhash.xxh3_128_hexdigest(raw)
    if kind == "blake3":
        import blake3

        return str(blake3.blake3(raw).hexdigest())
    if kind == "adler32":
        return f"{zlib.adler32(raw):08x}"
    raise ValueError(f"{kind!r} is no checksum; known are {', '.join(CHECKSUMS)}")


def _elements(data: Bytes, itemsize: int) -> npt.NDArray[Any]:
    return data.view(_UNITS[itemsize])


def _codec() -> Any:
    import pyarrow

    return pyarrow.Codec(COMPRESSION, compression_level=_LEVEL)


def _decompress(data: bytes) -> bytes:
    import pyarrow

    try:
        with pyarrow.CompressedInputStream(pyarrow.BufferReader(data), COMPRESSION) as stream:
            return stream.read()
    except OSError as error:
        raise ValueError(f"it cannot be decompressed: {error}") from None
