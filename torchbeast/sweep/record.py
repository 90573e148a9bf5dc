# SPDX-License-Identifier: Apache-2.0
"""The record of a sweep in its folder: what it compares, so that its name alone continues it."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchbeast.cli.command_line import flatten, parse
from torchbeast.errors import UsageError
from torchbeast.evaluation.config import EvaluationConfig
from torchbeast.learning.config import CheckpointConfig, HardwareConfig
from torchbeast.learning.recorded import OF_ONE_COMMAND
from torchbeast.reporting.config import DisplayConfig
from torchbeast.sweep.config import ProgramName, SweepConfig
from torchbeast.sweep.settings import FLAGS, Values, combinations, replaced, typed, values_of

# Flags that a continued sweep may change: its agents remain comparable.
_OPEN = {"total_steps", "working_dir", *OF_ONE_COMMAND}.union(
    field.name
    for config in (CheckpointConfig, DisplayConfig, EvaluationConfig, HardwareConfig)
    for field in dataclasses.fields(config)
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What a sweep compares."""

    program: ProgramName
    set: Values  # by their flags
    words: list[str]  # the flags that all agents have
    shared_replay: bool

    def settings(self) -> dict[str, Any]:
        """Returns every setting of the first agent, by the names of flags."""
        first = combinations(self.set)[0]
        return flatten(parse(FLAGS[self.program], self.program, [*self.words, *typed(first)]))


def compared(config: SweepConfig, words: Sequence[str], folder: Path) -> Compared:
    """Returns what a sweep compares: as the command line says, or as an earlier part recorded.

    words: the command line without the flags of the sweep.

    Raises UsageError where the two differ.
    """
    before, values = _recorded(folder), values_of(config.set)
    if before is None:
        if not values:
            raise UsageError(
                "give the flags to vary with their values, such as "
                "--set learning_rate=0.0003,0.0006; a single run needs no sweep"
            )
        program, shared = config.program or "monobeast", config.shared_replay
        return Compared(program=program, set=values, words=list(words), shared_replay=shared)
    if config.program not in (None, before.program):
        raise _other(folder, f"--program {before.program}", f"--program {config.program}")
    if config.shared_replay and not before.shared_replay:
        raise _other(folder, "a replay of their own or none", "--shared_replay")
    if values and values != before.set:
        raise _other(folder, _as_typed(before.set), _as_typed(values))
    now = dataclasses.replace(before, words=replaced(before.words, words))
    _check_same(before, now, folder)
    return now


def _check_same(before: Compared, now: Compared, folder: Path) -> None:
    """Raises UsageError where flags change something that makes agents differ."""
    if before.words == now.words:
        return
    old, new = before.settings(), now.settings()
    for name in new:
        if name not in _OPEN and old.get(name) != new[name]:
            raise _other(folder, f"{name} {old.get(name)}", f"{name} {new[name]}")


def _other(folder: Path, before: str, now: str) -> UsageError:
    return UsageError(
        f"the sweep {folder.name} compares agents with {before}, not with {now}: leave that out, "
        "or give another --name"
    )


def _as_typed(values: Values) -> str:
    words = [f"{key}={','.join(found)}" for key, found in values.items()]
    return f"--set {shlex.join(words)}"


def _recorded(folder: Path) -> Compared | None:
    """Returns what the earlier part of a sweep recorded, or None if there is none.

    Raises UsageError if the folder is another one.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return None
    try:
        recorded = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["args"]
        return Compared(**{f.name: recorded[f.name] for f in dataclasses.fields(Compared)})
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(
            f"{folder} is not the folder of a sweep: give another --name, or another --savedir"
        ) from None
