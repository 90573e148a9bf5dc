# SPDX-License-Identifier: Apache-2.0
"""Addresses for servers."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def address(runtime_folder: Path) -> str:
    """Returns a unix address without a server."""
    return f"unix:{runtime_folder}/env"
