# SPDX-License-Identifier: Apache-2.0
"""`--algo NAME`: the algorithm whose Config becomes a group of a program's flags."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import tyro

from torchbeast.cli.learner_flags import LearnerFlags, flag_of
from torchbeast.cli.resuming import kinds
from torchbeast.core.algos import registry
from torchbeast.core.specs import SpecError
from torchbeast.core.wording import renamed
from torchbeast.errors import RunError, UsageError, what_it_raised

Flags = TypeVar("Flags")


def with_algorithm(flags_type: type[Flags], name: str) -> type[Flags]:
    """Returns the program's flags with those of the algorithm.

    Raises UsageError if there is no such algorithm, or its settings cannot be flags.
    """
    config = _config(name)
    if not issubclass(flags_type, LearnerFlags) or config is _default_config(flags_type):
        return flags_type
    config = _without_clashes(config)
    _check_names(flags_type, name, config)
    _check_kinds(name, config)
    own = ("algorithm", config, dataclasses.field(default_factory=config))
    made: type[Flags] = _derived(flags_type, [own])
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


@functools.cache
def _without_clashes(config: type) -> type:
    """Returns the Config, with prefixes for flags of nested Configs that would clash.

    The prefix is the name of the nested Config's field, as in --critic_optimiser_learning_rate.
    """
    defaults = config()
    counts = Counter(_names(defaults))
    nested = {
        field.name: value
        for field in dataclasses.fields(config)
        if dataclasses.is_dataclass(value := getattr(defaults, field.name))
        and any(counts[name] > 1 for name in _names(value))
    }
    if not nested:
        return config
    made = {name: _prefixed(value, name) for name, value in nested.items()}
    return _derived(
        config,
        [(name, kind, dataclasses.field(default_factory=kind)) for name, kind in made.items()],
    )


def _prefixed(defaults: Any, prefix: str) -> type:
    """Returns the type of a nested Config with prefixed flags and these defaults."""
    base = type(defaults)
    hints, fields = typing.get_type_hints(base, include_extras=True), []
    for field in dataclasses.fields(defaults):
        if dataclasses.is_dataclass(getattr(defaults, field.name)):
            continue  # one level deeper; _check_names reports clashes there
        flag = f"{prefix}_{field.name}"
        default = dataclasses.field(
            default_factory=functools.partial(getattr, defaults, field.name),
            metadata={"flag": flag},
        )
        fields.append((field.name, Annotated[hints[field.name], tyro.conf.arg(name=flag)], default))
    flags = {name: f"{prefix}_{name}" for name, _, _ in fields}
    return _derived(base, fields, __post_init__=_check_naming(base, flags))


def _check_naming(base: type, flags: Mapping[str, str]) -> Callable[[Any], None]:
    """Returns the Config's check, whose sentences then name flags instead of fields."""
    check = getattr(base, "__post_init__", lambda config: None)

    def check_as_typed(config: Any) -> None:
        try:
            check(config)
        except ValueError as error:
            raise ValueError(renamed(str(error), flags)) from error

    return check_as_typed


def _derived(base: type, fields: list[tuple[str, Any, Any]], **methods: Any) -> type:
    """Returns a subclass with these fields and methods instead of the base's."""
    namespace = {"__doc__": base.__doc__, **methods}
    return dataclasses.make_dataclass(
        base.__name__, fields, bases=(base,), frozen=True, kw_only=True, namespace=namespace
    )


def _default_config(flags_type: type) -> Any:
    """Returns the class of the algorithm's Config that the flags have without --algo."""
    return type(getattr(flags_type(), "algorithm", None))


def _check_names(flags_type: type[LearnerFlags], name: str, config: type) -> None:
    """Raises UsageError when a setting has the name of another setting or of another flag."""
    counts = Counter(_names(config()))
    if twice := sorted(flag for flag, count in counts.items() if count > 1):
        raise UsageError(
            f"--algo {name} has more than one setting named {', '.join(twice)}: give "
            "them other names"
        )
    flags = flags_type()
    others = {
        field.name: getattr(flags, field.name)
        for field in dataclasses.fields(flags)
        if field.name != "algorithm"
    }
    taken = {flag for group in others.values() for flag in _names(group)}
    if both := sorted(taken & set(counts)):
        raise UsageError(
            f"--algo {name} has settings with the names of other flags, {', '.join(both)}: "
            "give them other names"
        )


def _check_kinds(name: str, config: type) -> None:
    """Raises UsageError when a setting is of a type that a checkpoint cannot record."""
    if unsaved := sorted(flag for flag, kind in kinds(config) if not _is_json(kind)):
        raise UsageError(
            f"--algo {name} has settings that JSON cannot hold, {', '.join(unsaved)}: make them "
            "numbers, strings or booleans, or None, lists, tuples or mappings of these"
        )


def _is_json(kind: Any) -> bool:
    """Returns whether JSON can hold all values of this type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return all(type(value) in _PLAIN for value in arguments)
    if origin in (typing.Union, types.UnionType, *_CONTAINERS):
        return all(_is_json(argument) for argument in arguments)
    return kind in (*_PLAIN, *_CONTAINERS, Any, ...)


_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, dict, Sequence, Mapping)


def _names(config: Any) -> list[str]:
    """Returns the names of all settings, including those of nested Configs."""
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        found += _names(value) if dataclasses.is_dataclass(value) else [flag_of(field)]
    return found
