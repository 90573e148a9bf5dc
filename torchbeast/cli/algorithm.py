# SPDX-License-Identifier: Apache-2.0
"""`--algo NAME`: the algorithm whose Config becomes a group of a program's flags."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

from torchbeast.cli.learner_flags import LearnerFlags
from torchbeast.cli.resuming import kinds
from torchbeast.core.algos import registry
from torchbeast.core.specs import SpecError
from torchbeast.errors import RunError, UsageError, what_it_raised

Flags = TypeVar("Flags")


def with_algorithm(flags_type: type[Flags], name: str) -> type[Flags]:
    """Returns the program's flags with those of the algorithm.

    Raises UsageError if there is no such algorithm, or its settings cannot be flags.
    """
    config = _config(name)
    if not issubclass(flags_type, LearnerFlags) or config is _default_config(flags_type):
        return flags_type
    _check_names(flags_type, name, config)
    made: type[Flags] = dataclasses.make_dataclass(
        flags_type.__name__,
        [("algorithm", config, dataclasses.field(default_factory=config))],
        bases=(flags_type,),
        frozen=True,
        kw_only=True,
        namespace={"__doc__": flags_type.__doc__},
    )
    return made


def _config(name: str) -> type:
    """Returns the Config of the algorithm.

    Raises UsageError if there is none, and RunError, with the traceback, when its code fails.
    """
    try:
        config = registry.config_of(name)
        config()  # its defaults pass its checks
    except SpecError as error:
        raise UsageError(f"--algo {name} cannot be used: {error}") from error
    except Exception as error:
        raise RunError(f"the algorithm {name} failed: {what_it_raised(error)}") from error
    return config


def _default_config(flags_type: type) -> Any:
    """Returns the class of the algorithm's Config that the flags have without --algo."""
    return type(getattr(flags_type(), "algorithm", None))


def _check_names(flags_type: type[LearnerFlags], name: str, config: type) -> None:
    """Raises UsageError when a setting has the name of another setting or of another flag."""
    settings = Counter(setting for setting, _ in kinds(config))
    flags = {flag for flag, _ in kinds(flags_type)}
    flags -= {flag for flag, _ in kinds(_default_config(flags_type))}
    if taken := sorted(n for n, count in settings.items() if count > 1 or n in flags):
        raise UsageError(
            f"--algo {name} has settings with the names of other settings or flags, "
            f"{', '.join(taken)}: give them other names"
        )


def check_recorded(settings: Mapping[str, Any]) -> None:
    """Raises UsageError for a setting that a checkpoint cannot record."""
    for name, value in settings.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise UsageError(
                f"--{name} has a value that JSON cannot hold, {value!r}: make it a number, string "
                "or boolean, or None, or a list, tuple or mapping of these"
            ) from error
