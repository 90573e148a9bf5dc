# SPDX-License-Identifier: Apache-2.0
"""The command line, derived from frozen dataclasses; a wrong one is a single sentence.

A program's flags are one dataclass whose fields are groups (dataclasses too). On the command
line they are flat: `--num_actors 10`, not `--machine.num_actors 10`.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from typing import Any, TypeVar

import tyro

from torchbeast.cli import presets, resuming
from torchbeast.errors import UsageError

Flags = TypeVar("Flags")

_BOX = "╭╮╰╯│─ "
_OUR_OWN = re.compile(
    r"^Error parsing \w+: (?=--)"
)  # tyro's words before a flag group's own sentence


def parse(flags_type: type[Flags], program: str, args: Sequence[str] | None) -> Flags:
    """The flags in `args` (None: sys.argv); UsageError when they are wrong.
    `--help` and `--preset help` print and exit.
    """
    words = sys.argv[1:] if args is None else args
    default = _default(flags_type, words)
    shown = io.StringIO()
    try:
        with redirect_stderr(shown):
            return tyro.cli(
                flags_type,
                prog=f"python -m torchbeast.{program}",
                args=words,
                default=tyro.MISSING_NONPROP if default is None else default,
                use_underscores=True,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as end:
        if end.code != 2:
            raise
        raise UsageError(f"{_first_sentence(shown.getvalue())} See --help.") from None


def _default(flags_type: type[Flags], words: Sequence[str]) -> Flags | None:
    """The program's defaults with what an earlier run and the preset say; None: its own."""
    of_preset = presets.settings(flags_type, words)  # first: it may print a list and exit
    values = {**resuming.settings(flags_type, words), **of_preset}
    return _replaced(flags_type(), values) if values else None


def _replaced(flags: Flags, values: Mapping[str, Any]) -> Flags:
    """A copy of the flags in which the groups' fields of these names have these values. It is not
    checked: flags on the command line may still change what does not fit.
    """
    replaced = copy.copy(flags)
    for field in dataclasses.fields(flags):  # type: ignore[arg-type]
        value = getattr(flags, field.name)
        if dataclasses.is_dataclass(value):
            object.__setattr__(replaced, field.name, _replaced(value, values))
        elif field.name in values:
            object.__setattr__(replaced, field.name, values[field.name])
    return replaced


def _first_sentence(box: str) -> str:
    """What tyro says in the first part of its box, on one line."""
    lines = []
    for line in box.splitlines()[1:]:
        text = line.strip(_BOX)
        if not text:
            break
        lines.append(text)
    sentence = " ".join(lines).removesuffix(".").rstrip()
    return _OUR_OWN.sub("", f"{sentence}.")


def flatten(flags: Any) -> dict[str, Any]:
    """Every flag by its name on the command line, without the groups."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        flat.update(flatten(value) if dataclasses.is_dataclass(value) else {field.name: value})
    return flat
