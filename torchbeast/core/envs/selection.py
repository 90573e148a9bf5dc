# SPDX-License-Identifier: Apache-2.0
"""Selection of entries of dict observations by key.

A key names an entry of the dict, `inventory`, or an entry of a nested dict, `inventory/glyphs`.
Selected entries keep their place: {"inventory": {"glyphs": ...}}.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchbeast.core.base.checks import did_you_mean
from torchbeast.errors import UsageError


def select(observation: Any, keys: Sequence[str]) -> Any:
    """Returns the entries that `keys` name, or everything when there are no keys.

    Keys that name nothing are ignored; `check_keys` reports them.
    """
    if not keys or not isinstance(observation, dict):
        return observation
    selected = {}
    for name, value in observation.items():
        start = f"{name}/"
        below = [key.removeprefix(start) for key in keys if key.startswith(start)]
        if name in keys:
            selected[name] = value
        elif below and isinstance(value, dict) and (inner := select(value, below)):
            selected[name] = inner
    return selected


def leaf_keys(observation: Any) -> list[str]:
    """Returns the keys that select each leaf of a dict observation; [] for other observations.

    A tuple inside the dict is one entry, because its elements have no keys.
    """
    if not isinstance(observation, dict):
        return []
    keys = []
    for name, value in observation.items():
        if isinstance(name, str):  # others are refused elsewhere
            inner = leaf_keys(value)
            keys += [f"{name}/{deeper}" for deeper in inner] or [name]
    return keys


def check_keys(observation: Any, keys: Sequence[str], whose: str) -> None:
    """Raises UsageError, listing the known keys, when one of `keys` selects nothing.

    whose: name of the environment in the message.
    """
    if not keys:
        return
    known = leaf_keys(observation)
    if not known:
        raise UsageError(
            f"{whose}: its observations are not a dict, so they have no {keys[0]!r}: remove "
            "observation_keys"
        )
    for key in keys:
        if not select(observation, [key]):
            raise UsageError(
                f"{whose}: its observations have no {key!r}{did_you_mean(key, known) or ';'} "
                f"choose from {' '.join(known)}"
            )
