# SPDX-License-Identifier: Apache-2.0
"""What all tests share: few threads, a watch on tests that hang,
and no folder of the user touched."""

from __future__ import annotations

import faulthandler
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

_HANGS_AFTER_S = 240.0


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A test that hangs ends the session with the stack of every thread."""
    faulthandler.dump_traceback_later(_HANGS_AFTER_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where sockets lie during a test: a folder of its own,
    with a name short enough for sockets.
    """
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)
