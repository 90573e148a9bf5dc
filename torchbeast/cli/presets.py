# SPDX-License-Identifier: Apache-2.0
"""`--preset NAME` makes the settings of a preset of the zoo the defaults.

Flags on the command line override the preset.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from torchbeast.cli.resuming import given
from torchbeast.core.base.checks import counted, did_you_mean
from torchbeast.errors import UsageError
from torchbeast.zoo import NAMES, PREFIX, PRESETS, records

_INDENT = 30  # of the sentences of the overview
_NOTE = (
    "Score: interquartile mean over seeds that were held out, with its 95 % interval. Minutes: on "
    "two shared cores. --preset help:PART prints the flags of all presets with PART in their name."
)


def settings(args: Sequence[str]) -> Mapping[str, Any]:
    """Returns the flags of the preset that `args` names, by name on the command line.

    Raises UsageError for an unknown preset. `--preset help` prints an overview, `--preset
    help:PART` the flags of the presets with PART in their name, and both exit. Only programs that
    train have presets.
    """
    name = given(args, "--preset")
    if name is None:
        return {}
    name = name.lower()
    if name in NAMES:
        return PRESETS[NAMES[name]].flags
    asks, _, part = name.partition(":")
    if asks != "help":
        raise _unknown(name)
    if part:
        print("\n".join(_with_flags(part)))
    else:
        print(_overview(PRESETS), *_wrapped(_NOTE, "", ""), sep="\n")
    raise SystemExit(0)


def with_interval(score: float, low: float, high: float) -> str:
    """Returns a score with its interval, to print."""
    score_in_words, *ends = (
        f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}" for value in (score, low, high)
    )
    return f"{score_in_words} [{', '.join(ends)}]"


def _unknown(name: str) -> UsageError:
    if name and (found := _with_part(name)):
        return UsageError(f"there is no preset {name!r}, use one of these:\n{_overview(found)}")
    hint = did_you_mean(name, NAMES) or "."
    return UsageError(f"there is no preset {name!r}{hint} --preset help lists all presets")


def _with_part(part: str) -> list[str]:
    """Returns the presets that have a part in their name, or in an earlier one."""
    return list(dict.fromkeys(name for spelt, name in NAMES.items() if part in spelt))


def _overview(names: Iterable[str]) -> str:
    """Describes presets by family, in lines that fit the terminal."""
    lines = []
    for family, of_family in groupby(names, lambda name: PRESETS[name].family):
        lines.append(f"{family}:")
        for name in of_family:
            lines += _wrapped(_described(name), f"  {name} ".ljust(_INDENT), " " * _INDENT)
    return "\n".join(lines)


def _described(name: str) -> str:
    """Returns the sentence of a preset, and what its record says."""
    sentence, record = PRESETS[name].sentence, records().get(name)
    if record is None:
        return sentence
    score = with_interval(record.score, *record.interval)
    runs, minutes = counted(record.seeds, "seed"), max(1, round(record.minutes))
    agent = f" Agent: {PREFIX}{name}." if record.agent else ""
    return f"{sentence} Score {score}, {runs}, {minutes} min.{agent}"


def _with_flags(part: str) -> Iterator[str]:
    """Yields lines about the presets that have a part in their name, with flags to paste."""
    if not (names := _with_part(part)):
        raise _unknown(part)
    for name in names:
        yield name
        yield from _wrapped(_described(name), "  ", "  ")
        flags = re.sub(" (?!--)", "\0", PRESETS[name].words)  # a value stays on its flag's line
        yield " \\\n".join(_wrapped(flags, "  ", "  ")).replace("\0", " ")


def _wrapped(text: str, first: str, others: str) -> list[str]:
    """Breaks a text into lines that fit the terminal; first, others: how lines begin."""
    width = shutil.get_terminal_size().columns - len(" \\")
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
    )
