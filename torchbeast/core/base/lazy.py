# SPDX-License-Identifier: Apache-2.0
"""Names of a package that are imported when they are used, so that the package loads no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def importing(package: str, found_in: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package (PEP 562).

    found_in: the module of each name, with a colon and its name in that module if it differs;
        or the module itself.
    """

    def get(name: str) -> Any:
        if name not in found_in:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path, _, attribute = found_in[name].partition(":")
        module = importlib.import_module(f"{package}.{path}")
        return module if path.endswith(f".{name}") else getattr(module, attribute or name)

    return get
