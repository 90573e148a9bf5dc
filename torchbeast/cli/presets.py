# SPDX-License-Identifier: Apache-2.0
"""`--preset NAME` makes the settings of a preset of the zoo the defaults.

Flags on the command line override the preset.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from torchbeast.cli.resuming import given
from torchbeast.core.base.checks import did_you_mean
from torchbeast.errors import UsageError
from torchbeast.zoo import NAMES, PRESETS


def settings(args: Sequence[str]) -> Mapping[str, Any]:
    """Returns the flags of the preset that `args` names, by name on the command line.

    Raises UsageError for an unknown preset. `--preset help` prints all presets and exits. Only
    programs that train have presets.
    """
    name = given(args, "--preset")
    if name is None:
        return {}
    if name == "help":
        print(listing())
        raise SystemExit(0)
    name = name.lower()
    if name not in NAMES:
        known, hint = ", ".join(PRESETS), did_you_mean(name, NAMES)
        raise UsageError(f"there is no preset {name!r}: use {known}, or help for a list{hint}")
    return PRESETS[NAMES[name]].flags


def listing() -> str:
    """Describes every preset with its settings, in lines that fit the terminal."""
    width = shutil.get_terminal_size().columns - len("   \\")
    lines = []
    for name, preset in PRESETS.items():
        flags = re.sub(" (?!--)", "\0", preset.words)  # a value stays on the line of its flag
        commands = textwrap.wrap(flags, width, break_on_hyphens=False)
        lines += [name, *(f"  {line}" for line in textwrap.wrap(preset.sentence, width))]
        lines.append("  " + " \\\n  ".join(commands).replace("\0", " "))
    return "\n".join(lines)
