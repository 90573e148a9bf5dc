# SPDX-License-Identifier: Apache-2.0
"""Files of a saved replay: a header of JSON, then arrays as they are in memory, then a checksum.

    b"torchbeast replay\\n"
    size of the header (8 bytes, little-endian), header
    arrays, without sizes: the reader knows them from the header and from the arrays before
    CRC-32 of everything before (4 bytes, little-endian)

Arrays are written and read one by one, straight from and to memory. Nothing in a file is executed.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, BinaryIO

import numpy as np

from torchbeast.core.base.checks import require

FORMAT = 2

_MAGIC = b"torchbeast replay\n"
_LARGEST_HEADER = 2**28  # bytes
_LARGEST_INTEGER = 2**40
LARGEST_COUNT = 2**63 - 1


class ReplayWriter:
    """Writes a file from beginning to end."""

    def __init__(self, file: BinaryIO, header: dict[str, Any]) -> None:
        """Writes the header, with the format's number."""
        self._file = file
        self._checksum = 0
        text = json.dumps({"format": FORMAT, **header}).encode()
        self._write(_MAGIC + len(text).to_bytes(8, "little") + text)

    def array(self, array: np.ndarray) -> None:
        """Writes a contiguous array."""
        self._write(_bytes(array))

    def end(self) -> None:
        """Writes the checksum."""
        self._file.write(self._checksum.to_bytes(4, "little"))

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._checksum = zlib.crc32(data, self._checksum)


class ReplayReader:
    """Reads a file from beginning to end; every method raises ValueError if it is damaged.

    header: the writer's.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Reads the header."""
        self._file = file
        self._checksum = 0
        require(self._read(len(_MAGIC)) == _MAGIC, "the file is not a saved replay")
        size = int.from_bytes(self._read(8), "little")
        require(size <= _LARGEST_HEADER, f"the header cannot have {size} bytes")
        self.header = json.loads(self._read(size))
        version = self.header["format"]
        require(
            version == FORMAT, f"its format is {version}, but this TorchBeast reads format {FORMAT}"
        )

    def into(self, array: np.ndarray) -> None:
        """Reads a contiguous array."""
        data = _bytes(array)
        count = self._file.readinto(data)  # type: ignore[attr-defined]
        require(count == len(data), "the file ends too early")
        self._checksum = zlib.crc32(data, self._checksum)

    def array(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Returns the next array."""
        array = np.empty(shape, dtype)
        self.into(array)
        return array

    def end(self) -> None:
        """Checks that everything before was read as it was written."""
        computed = self._checksum
        written = int.from_bytes(self._read(4), "little")
        require(written == computed, f"its checksum is {computed:08x}, not {written:08x}")

    def _read(self, size: int) -> bytes:
        return self.array((size,), "uint8").tobytes()


def integer(value: Any, most: int = _LARGEST_INTEGER) -> int:
    """Returns an integer of a header; ValueError unless it is one, and between 0 and `most`."""
    is_valid = type(value) is int and 0 <= value <= most
    require(is_valid, f"it needs a number from 0 to {most}, got {value!r}")
    return int(value)


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
