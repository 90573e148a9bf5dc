# SPDX-License-Identifier: Apache-2.0
"""Flags whose values are JSON objects: the keyword arguments of environments and networks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

KWARGS = Mapping[str, Any]
"""The type of a field whose flag is a JSON object."""

REGISTRY = ConstructorRegistry()
"""Tells tyro how to read and show these flags."""


@REGISTRY.primitive_rule
def _json_object(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if info.type != KWARGS:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=_read,
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=lambda value: [json.dumps(value)],
    )


def _read(words: Sequence[str]) -> dict[str, Any]:
    """Reads the flag's word; raises ValueError unless it is a JSON object."""
    try:
        value = json.loads(words[0])
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object such as '{{\"size\": 8}}', got {words[0]}")
    return value
