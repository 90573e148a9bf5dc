# SPDX-License-Identifier: Apache-2.0
"""The names of settings in sentences: flags for the programs, arguments for a caller in Python.

The sentences of checks name fields, num_actors; others name flags, --num_actors. Each entry point
replaces them by what its user types: a program by flags, `as_arguments` by arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_FLAG = re.compile(r"(?<![-\w])--(\w+)(?![-\w])")
_arguments: ContextVar[Mapping[str, str]] = ContextVar("_arguments")


def counted(count: int, noun: str) -> str:
    """Returns so many of something in words: "1 server", "2 servers"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def typed(flag: str, value: object) -> list[str]:
    """Returns a flag and its value as words of a command line that the programs read back."""
    text = str(value)
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]


def renamed(sentence: str, names: Mapping[str, str]) -> str:
    """Replaces names in a sentence by others.

    Names that are plain words, such as "model", are replaced only at the start of the sentence.
    """
    for name, other in names.items():
        where = r"(?<![-\w])" if "_" in name else "^"
        sentence = re.sub(rf"{where}{name}\b", other, sentence)
    return sentence


def worded(sentence: str) -> str:
    """Returns a sentence that names flags, with the arguments of the caller if there is one."""
    names = _arguments.get(None)
    if names is None:
        return sentence
    return _FLAG.sub(lambda found: names.get(found[1], found[0]), sentence)


@contextmanager
def as_arguments(names: Mapping[str, str], *, fields: bool = False) -> Iterator[None]:
    """Has sentences name arguments: those of errors of the body, and those that it words.

    names: the argument for each flag or field, a phrase where there is none of that meaning.
    fields: replace the names of fields too, where the body has no arguments with the same names.
    """
    token = _arguments.set(names)
    try:
        yield
    except (ValueError, NotImplementedError, RuntimeError) as error:
        if error.args and isinstance(error.args[0], str):
            said = worded(error.args[0])
            said = renamed(said, names) if fields else said
            error.args = (said, *error.args[1:])
        raise
    finally:
        _arguments.reset(token)
