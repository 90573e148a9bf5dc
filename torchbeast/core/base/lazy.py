# SPDX-License-Identifier: Apache-2.0
"""Names of a package that are imported when they are first used, so that the package loads no torch
on import.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from typing import Any


def importing(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__all__`, `__getattr__` and `__dir__` of a package (PEP 562).

    The package lists its names once, as imports under `if TYPE_CHECKING:`, which type checkers read
    as well.

    Args:
        package: The package's `__name__`.

    Returns:
        The sorted names, the function that imports one of them, and a function that returns the
        package's `__all__`, to which the package may add names that it imports itself.
    """
    source = inspect.getsource(sys.modules[package])
    found = {
        name.asname: (line.module, name.name)
        for block in ast.parse(source).body
        if isinstance(block, ast.If)
        for line in block.body
        if isinstance(line, ast.ImportFrom) and line.module
        for name in line.names
        if name.asname
    }

    def get(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = found[name]
        return getattr(__import__(module, fromlist=[attribute]), attribute)

    return sorted(found), get, lambda: sorted(sys.modules[package].__all__)
