# SPDX-License-Identifier: Apache-2.0
"""Provides the workshop in which tests start programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import Workshop


@pytest.fixture
def workshop(tmp_path: Path, runtime_folder: Path) -> Iterator[Workshop]:
    made = Workshop(tmp_path, runtime_folder)
    yield made
    made.close()
