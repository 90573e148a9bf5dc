# SPDX-License-Identifier: Apache-2.0
"""A file that grows by whole pieces: on a full disk a piece is lost as a whole, never cut."""

from __future__ import annotations

import os
from pathlib import Path

from torchbeast.reporting.locks import Lock, lock


class AppendedFile:
    """Appends pieces of text, each at once. Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it."""
        self.path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in it yet."""
        return self._size() == 0

    def append(self, text: str) -> None:
        """Appends all of the text. Raises OSError, and leaves the file as it was, if it cannot.

        Names of files that are not UTF-8 are written with escapes.
        """
        before, data = self._size(), memoryview(text.encode(errors="backslashreplace"))
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._file.truncate(before)
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def lock(self) -> bool:
        """Locks the file until it is closed; returns False if another process has locked it.

        On a file system without locks it does nothing.
        """
        return lock(self._file) is not Lock.OTHERS

    def close(self) -> None:
        """Closes the file. No method may be called afterwards."""
        self._file.close()

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size
