# SPDX-License-Identifier: Apache-2.0
"""The names of flags."""

from __future__ import annotations

import dataclasses
from typing import Any


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Returns the name of a field's flag: its own, unless cli/algorithm.py gave it a prefix."""
    name: str = field.metadata.get("flag", field.name)
    return name
