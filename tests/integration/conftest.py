# SPDX-License-Identifier: Apache-2.0
"""Provides the workshop in which tests start programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import Workshop


@pytest.fixture
def workshop(
    tmp_path: Path, runtime_folder: Path, request: pytest.FixtureRequest
) -> Iterator[Workshop]:
    is_short = request.node.get_closest_marker("long") is None
    made = Workshop(tmp_path, runtime_folder, is_warm=is_short)
    yield made
    made.close()
