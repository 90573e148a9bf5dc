# SPDX-License-Identifier: Apache-2.0
"""Lets processes that tests start import the environments and models of the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchbeast

TESTS = Path(__file__).parents[1]
FOLDERS = [
    *(TESTS / room for room in ("support", "collect", "gradients", "on_ray")),
    Path(torchbeast.__file__).parents[1],
]


@pytest.fixture(scope="session", autouse=True)
def children_import_from_tests() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folders = [*map(str, FOLDERS), *filter(None, [os.getenv("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(folders))
        yield
