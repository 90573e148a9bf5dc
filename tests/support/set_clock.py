# SPDX-License-Identifier: Apache-2.0
"""A clock for programs of a test that can be set while they run; the machine's own stays."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest


class SetClock:
    """The clock of all programs that are started with `environ`."""

    def __init__(self, folder: Path) -> None:
        """Compiles the library that they load; skips the test where that cannot be."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if sys.platform != "linux" or compiler is None:
            pytest.skip("a clock that can be set needs Linux and a C compiler")
        library, source = folder / "set_clock.so", Path(__file__).with_suffix(".c")
        words = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
        subprocess.run([*words, "-lpthread"], check=True)
        self._file = folder / "set_clock"
        self._seconds = 0
        self._write()
        self.environ = {"LD_PRELOAD": str(library), "SET_CLOCK_FILE": str(self._file)}

    def jump(self, seconds: int) -> None:
        """Moves the clock forward, or back where it is less than 0."""
        self._seconds += seconds
        self._write()

    def _write(self) -> None:
        with open(self._file, "r+b" if self._file.exists() else "xb") as file:
            file.write(struct.pack("=q", self._seconds))
