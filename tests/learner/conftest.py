# SPDX-License-Identifier: Apache-2.0
"""Lets processes that these tests start import the tests' environments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDERS = [str(Path(__file__).parents[1] / "support")]


@pytest.fixture(scope="session", autouse=True)
def children_import_from_tests() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, *FOLDERS])
        yield
