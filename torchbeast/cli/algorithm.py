# SPDX-License-Identifier: Apache-2.0
"""`--algo NAME`: the algorithm whose Config becomes a group of a program's flags."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torchbeast.cli.flags import LearnerFlags
from torchbeast.cli.resuming import kinds
from torchbeast.core.algos import registry
from torchbeast.errors import UsageError

Flags = TypeVar("Flags")


def with_algorithm(flags_type: type[Flags], name: str) -> type[Flags]:
    """Returns the program's flags with those of the algorithm; UsageError if there is none."""
    config = _config(name)
    if not issubclass(flags_type, LearnerFlags) or config is _usual(flags_type):
        return flags_type
    _check_names(flags_type, name, config)
    _check_kinds(name, config)
    own = ("algorithm", config, dataclasses.field(default_factory=config))
    made: type[Flags] = dataclasses.make_dataclass(
        flags_type.__name__,
        [own],
        bases=(flags_type,),
        frozen=True,
        kw_only=True,
        namespace={"__doc__": flags_type.__doc__},
    )
    return made


def _config(name: str) -> type:
    try:
        config = registry.config_of(name)
        is_config = dataclasses.is_dataclass(config)
        config()  # every field has a default
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"--algo {name} cannot be used: {error}") from error
    if not is_config:
        raise UsageError(f"--algo {name} cannot be used: its Config is no dataclass")
    return config


def _usual(flags_type: type) -> Any:
    """The Config that the flags have already."""
    return type(getattr(flags_type(), "algorithm", None))


def _check_names(flags_type: type[LearnerFlags], name: str, config: type) -> None:
    """UsageError when two of the algorithm's settings have one name, or one has another part's."""
    counts = Counter(_names(config()))
    if twice := sorted(flag for flag, count in counts.items() if count > 1):
        raise UsageError(
            f"--algo {name} has more than one setting of the name {', '.join(twice)}: flags have "
            "no prefix, so give them other names"
        )
    usual = flags_type()
    others = {
        field.name: getattr(usual, field.name)
        for field in dataclasses.fields(usual)
        if field.name != "algorithm"
    }
    taken = {flag for group in others.values() for flag in _names(group)}
    if both := sorted(taken & set(counts)):
        raise UsageError(
            f"--algo {name} has settings of the names of other flags, {', '.join(both)}: "
            "give them other names"
        )


def _check_kinds(name: str, config: type) -> None:
    """UsageError when a setting is of a type that a checkpoint cannot record."""
    if unsaved := sorted(flag for flag, kind in kinds(config) if not _is_json(kind)):
        raise UsageError(
            f"--algo {name} has settings that are no JSON, {', '.join(unsaved)}: make them "
            "numbers, strings or booleans, or None, lists, tuples or mappings of these"
        )


def _is_json(kind: Any) -> bool:
    """Returns whether JSON has all values of this type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return all(type(value) in _PLAIN for value in arguments)
    if origin in (typing.Union, types.UnionType, *_CONTAINERS):
        return all(_is_json(argument) for argument in arguments)
    return kind in (*_PLAIN, *_CONTAINERS, Any, ...)


_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, dict, Sequence, Mapping)


def _names(config: Any) -> list[str]:
    """The names of the settings, of nested Configs too."""
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        found += _names(value) if dataclasses.is_dataclass(value) else [field.name]
    return found
