# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of `create_factory`: a wrong name is refused at once, not in a worker.

Imports nothing of ours, so that torchbeast.core.envs can use it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

Class = TypeVar("Class", bound=type)
P = ParamSpec("P")
R = TypeVar("R")


def refuse_unknown(owner: str, given: Iterable[str], accepted: Collection[str]) -> None:
    """Raises TypeError, with the names that there are, unless every given name is accepted."""
    for name in given:
        if name not in accepted:
            close = get_close_matches(name, accepted, n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise TypeError(f"{owner} takes no {name!r}{hint} It takes {', '.join(accepted)}")


def names_checked(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a class method refuse unknown keyword arguments as `refuse_unknown` does."""
    accepted = list(inspect.signature(function).parameters)[1:]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        owner = getattr(args[0], "__name__", type(args[0]).__name__)
        refuse_unknown(f"{owner}.{function.__name__}", kwargs, accepted)
        return function(*args, **kwargs)

    return checked


def init_names_checked(cls: Class) -> Class:
    """Makes a class refuse unknown keyword arguments as `refuse_unknown` does."""
    init = names_checked(cls.__init__)  # type: ignore[misc]

    @functools.wraps(init)
    def checked(self: Any, **kwargs: Any) -> None:
        init(self, **kwargs)

    setattr(cls, "__init__", checked)  # noqa: B010
    return cls
