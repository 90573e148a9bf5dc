# SPDX-License-Identifier: Apache-2.0
"""What a caller in Python types for each flag of the programs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from torchbeast.core.wording import as_arguments
from torchbeast.schemes.scheme import Scheme

P = ParamSpec("P")
R = TypeVar("R")

_OF_LEARNER = {
    "xpid": "log_dir",
    "savedir": "log_dir",
    "total_steps": "target_steps",
}


def arguments(scheme: object) -> Mapping[str, str]:
    """Returns the arguments of a Learner, and of the components of its scheme, by flag."""
    of_scheme = scheme.arguments if isinstance(scheme, Scheme) else {}
    return {**of_scheme, **_OF_LEARNER}


def named_by_arguments(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """Has the sentences of a Learner's method name arguments in place of flags."""

    @functools.wraps(method)
    def named(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with as_arguments(arguments(self.scheme)):
            return method(self, *args, **kwargs)

    return named
