# SPDX-License-Identifier: Apache-2.0
"""Leaves cases of a test to the long tests."""

from __future__ import annotations

from typing import Any

import pytest


def later(*values: Any) -> Any:
    """Returns the values of a case that only `make test-long` runs."""
    return pytest.param(*values, marks=pytest.mark.long)
