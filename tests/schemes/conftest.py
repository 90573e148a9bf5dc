# SPDX-License-Identifier: Apache-2.0
"""Workers that these tests start find the tests' own environments and models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchbeast

FOLDERS = [Path(__file__).parent, Path(__file__).parents[1], Path(torchbeast.__file__).parents[1]]


@pytest.fixture(scope="session", autouse=True)
def workers_import_from_tests() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folders = [*map(str, FOLDERS), *filter(None, [os.getenv("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(folders))
        yield
