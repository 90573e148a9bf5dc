# SPDX-License-Identifier: Apache-2.0
"""Algorithms by name: the built-in ones, or a user's "my_module:MyAlgo"."""

from __future__ import annotations

import importlib
from typing import Any

from torchbeast.core.algos.base import Algorithm

ALGOS = {"impala": "torchbeast.core.algos.impala:Impala"}


def find(name: str) -> type[Algorithm[Any]]:
    """The algorithm of that name; ValueError when there is none, TypeError when it is something
    else.
    """
    module, colon, attribute = ALGOS.get(name, name).partition(":")
    if not colon:
        raise ValueError(f"no algorithm {name!r}: use {', '.join(ALGOS)}, or my_module:MyAlgo")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import the algorithm {name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise TypeError(f"{name} is no algorithm: it must be a subclass of {_base()}")
    return found


def _base() -> str:
    return f"{Algorithm.__module__}.{Algorithm.__qualname__}"
