# SPDX-License-Identifier: Apache-2.0
"""One build of the compiled modules works with every version of torch and numpy."""

from __future__ import annotations

from pathlib import Path

import pytest

import libtorchbeast._C
import nest

LIBRARIES = [b"libtorch.so", b"libtorch_cpu", b"libtorch_python", b"libc10", b"libtorch.dylib"]


@pytest.mark.parametrize("path", [libtorchbeast._C.__file__, nest.__file__], ids=["_C", "nest"])
def test_the_compiled_modules_link_no_torch(path: str) -> None:
    """The names of the libraries that a module needs are plain text in its file."""
    module = Path(path).read_bytes()
    assert b"libstdc++" in module or b"libc++" in module, "names are found this way"
    assert [name for name in LIBRARIES if name in module] == []
