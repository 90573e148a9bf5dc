# SPDX-License-Identifier: Apache-2.0
"""Traits and checks of settings, and words for messages.

Each message names the setting, what it may be and what it was. A setting of None has no value and
passes. The module imports nothing else of TorchBeast, so that torchbeast.core.envs can use it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MethodType
from typing import Any, Literal, TypeVar, cast

Trait = Literal["command", "connection", "rank", "incidental", "agent", "task", "served", "atari"]
"""What kind of setting it is.

command: belongs to a command, not to a run. connection: so does this, and the next command has to
repeat it. rank: may differ between learners that train together. incidental: has no effect on what
a run learns. agent: the evaluation of a run takes it from the run. task: the environment. served:
running environment servers decide it. atari: an option of Atari games.
"""


def setting(default: Any, *traits: Trait, bounds: tuple[Any, ...] = ()) -> Any:
    """Returns the field of a Config with these traits and bounds.

    Args:
        default: The default, or a function that makes it.
        *traits: The traits.
        bounds: What Settings checks: a function such as those below, and its limits, as in
            `(between, 0, 1)`. A field that a subclass declares again keeps them.
    """
    metadata = {"traits": traits, "bounds": bounds}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Settings:
    """Base class of Configs: checks the bounds of their settings."""

    def __post_init__(self) -> None:
        bounds = {
            name: field.metadata["bounds"]
            for cls in reversed(type(self).__mro__)
            for name, field in vars(cls).get("__dataclass_fields__", {}).items()
            if field.metadata.get("bounds")
        }
        for name, (check, *limits) in bounds.items():
            check(*limits, **{name: getattr(self, name)})


def names_with(trait: Trait, *configs: Any) -> set[str]:
    """Returns the names of the settings that have a trait, of Configs within these, too.

    Args:
        trait: The trait. "command" includes connections.
        configs: Configs, or their classes.
    """
    names: set[str] = set()
    for config in (source() if isinstance(source, type) else source for source in configs):
        for field in dataclasses.fields(config):
            value, traits = getattr(config, field.name), field.metadata.get("traits", ())
            if dataclasses.is_dataclass(value):
                names |= names_with(trait, value)
            elif trait in traits or (trait == "command" and "connection" in traits):
                names.add(field.name)
    return names


def require(holds: bool, sentence: str) -> None:
    """Raises ValueError unless a condition holds.

    Args:
        holds: The condition.
        sentence: The message.
    """
    if not holds:
        raise ValueError(sentence)


def at_least(minimum: float, **values: float | None) -> None:
    """Raises ValueError unless every value is `minimum` or more.

    Args:
        minimum: The smallest value that is allowed.
        **values: The values by the names of the settings; None passes.
    """
    _require_each(values, lambda value: value >= minimum, f"at least {minimum}")


def above(limit: float, **values: float | None) -> None:
    """Raises ValueError unless every value is greater than `limit`.

    Args:
        limit: A number below every value.
        **values: The values by the names of the settings; None passes.
    """
    _require_each(values, lambda value: value > limit, f"greater than {limit}")


def between(low: float, high: float, **values: float | None) -> None:
    """Raises ValueError unless every value is in [low, high].

    Args:
        low: The smallest value that is allowed.
        high: The largest value that is allowed.
        **values: The values by the names of the settings; None passes.
    """
    _require_each(values, lambda value: low <= value <= high, f"between {low} and {high}")


def below_one(**values: float | None) -> None:
    """Raises ValueError unless every value is in [0, 1).

    Args:
        **values: The values by the names of the settings; None passes.
    """
    _require_each(values, lambda value: 0 <= value < 1, "at least 0 and below 1")


def _require_each(
    values: Mapping[str, float | None], holds: Callable[[float], bool], words: str
) -> None:
    for name, value in values.items():
        require(value is None or holds(value), f"{name} must be {words}, got {value}")


def one_of(choices: Sequence[str], **values: str) -> None:
    """Raises ValueError unless every value is one of the choices.

    Args:
        choices: The values that are allowed.
        **values: The values by the names of the settings.
    """
    for name, value in values.items():
        require(value in choices, f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_device(**values: str) -> None:
    """Raises ValueError unless every value is a device: auto, cpu, cuda, or cuda:N.

    Args:
        **values: The values by the names of the settings.
    """
    for name, value in values.items():
        require(
            re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is not None,
            f"{name} must be auto, cpu, cuda, or the number of a GPU as in cuda:1, got {value!r}"
            + ". Apple's GPUs are not supported: use cpu" * value.startswith("mps"),
        )


F = TypeVar("F")
C = TypeVar("C", bound=type)


_LISTED = 8  # names in a message, at most


def in_any_case(name: str, known: Iterable[str]) -> str:
    """Returns the known name that differs from `name` only in case, or else `name`.

    Args:
        name: A name as somebody typed it.
        known: The names that there are.
    """
    return {spelling.lower(): spelling for spelling in known}.get(name.lower(), name)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message that suggests the closest known names, or an empty string.

    Args:
        name: The name that is unknown.
        known: The names that there are.
    """
    by_lower = {candidate.lower(): candidate for candidate in sorted(known)}
    close = get_close_matches(name.lower(), by_lower, n=3)
    return f"; did you mean {' or '.join(by_lower[match] for match in close)}?" if close else ""


def refuse_unknown(owner: str, given: Iterable[str], accepted: Collection[str]) -> None:
    """Raises TypeError, with similar names or a short list, unless every given name is accepted.

    Args:
        owner: Names what takes the names, in the message.
        given: The names to check.
        accepted: The names that there are.
    """
    for name in given:
        if name not in accepted:
            hint = did_you_mean(name, accepted) or "."
            is_short = len(accepted) <= _LISTED
            known = f"It takes {', '.join(accepted)}" if is_short else f"See help({owner})"
            raise TypeError(f"{owner} takes no {name!r}{hint} {known}")


def suggesting(cls: C) -> C:
    """Lets the constructor of a class suggest the closest name for an unknown argument."""
    construct, parameters = cls.__init__, inspect.signature(cls).parameters  # type: ignore[misc]

    @functools.wraps(construct)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(cls.__name__, kwargs, parameters)
        construct(self, *args, **kwargs)

    setattr(cls, "__init__", checked)  # noqa: B010
    return cls


def signed(settings: Callable[[Any], Mapping[str, tuple[Any, Any]]]) -> Callable[[F], F]:
    """Gives a class method `**settings` its own signature in each class, which `help()` shows, and
    makes it refuse other names as `refuse_unknown` does.

    Args:
        settings: Returns the annotation and the default of each setting of a class, by name.
    """

    class Signed(classmethod):  # type: ignore[type-arg]
        def __get__(self, instance: object, owner: type | None = None) -> Any:
            method, accepted = self.__func__, settings(owner)

            @functools.wraps(method)
            def checked(cls: type, **given: Any) -> Any:
                refuse_unknown(f"{cls.__name__}.{method.__name__}", given, accepted)
                return method(cls, **given)

            signature = inspect.signature(method)
            first, rest = signature.parameters.values()
            others = [
                rest.replace(name=name, kind=rest.KEYWORD_ONLY, annotation=kind, default=default)
                for name, (kind, default) in accepted.items()
            ]
            signature = signature.replace(parameters=[first, *others])
            setattr(checked, "__signature__", signature)  # noqa: B010
            return MethodType(checked, owner)

    return cast(Callable[[F], F], lambda method: Signed(method.__func__))


def short_repr(self: Any) -> str:
    """Returns the `repr` of a dataclass with only the fields that differ from their defaults."""
    entries = []
    for field in dataclasses.fields(self):
        default = field.default_factory() if callable(field.default_factory) else field.default
        if field.repr and (value := getattr(self, field.name)) != default:
            entries.append(f"{field.name}={value!r}")
    return f"{type(self).__name__}({', '.join(entries)})"


def counted(count: int, noun: str) -> str:
    """Returns a number and its noun: "1 server", "2 servers".

    Args:
        count: The number.
        noun: The noun in the singular.
    """
    return f"{count} {noun}{'s' * (count != 1)}"


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Returns the first names of a list, and how many more there are: "a, b, c and 7 more".

    Args:
        names: The names.
        most: The maximum number of names in the result.
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def interpreter() -> str:
    """Returns the Python that runs, as a word of a command line for this terminal."""
    return _as_typed("python", os.path.abspath(sys.executable))


def _as_typed(name: str, path: str) -> str:
    """Returns the name of a program if a terminal finds this file by it, else the file's path."""
    first_in_path = shutil.which(name)
    if (
        first_in_path
        and os.path.dirname(os.path.abspath(first_in_path)) == os.path.dirname(path)
        and os.path.samefile(first_in_path, path)
    ):
        return name
    return shlex.quote(path.removeprefix(os.getcwd() + os.sep))


def command(program: str) -> str:
    """Returns the start of a command that runs one of our programs, as this one was started: by the
    command torchbeast, or as a module of the Python that runs.

    Args:
        program: Its name, such as "monobeast".
    """
    script = os.path.abspath(next(iter(sys.orig_argv[1:]), ""))
    if os.path.basename(script) == "torchbeast" and os.path.isfile(script):
        name = "train" if program == "monobeast" else program
        return f"{_as_typed('torchbeast', script)} {name}"
    return f"{interpreter()} -m torchbeast.{program}"


def typed(flag: str, value: object) -> list[str]:
    """Returns a flag and its value as words of a command line that the programs read back.

    Args:
        flag: The flag, such as "--seed".
        value: Its value.
    """
    text = str(value)
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]
