# SPDX-License-Identifier: Apache-2.0
"""The names of flags, and sentences that name them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Returns the name of a field's flag: its own, unless cli/algorithm.py gave it a prefix."""
    name: str = field.metadata.get("flag", field.name)
    return name


def renamed(sentence: str, names: Mapping[str, str]) -> str:
    """Replaces names in a sentence by others.

    Names that are plain words, such as "model", are replaced only at the start of the sentence.
    """
    for name, other in names.items():
        where = r"(?<![-\w])" if "_" in name else "^"
        sentence = re.sub(rf"{where}{name}\b", other, sentence)
    return sentence
