# SPDX-License-Identifier: Apache-2.0
"""Numbers that an environment gives in the info of a game's last step, by keyword."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

FinalInfo = Mapping[int, Mapping[str, Any]]
"""The info of the last step of each game that ended in one step, by the environment's index."""


def check_keywords(keywords: Sequence[str]) -> None:
    """Raises ValueError unless the keywords can be names of log columns."""
    if isinstance(keywords, str):
        raise ValueError(f"info_keywords must be a list of names, got the text {keywords!r}")
    for name in keywords:
        if not name or name.strip() != name or not name.isprintable() or "," in name:
            raise ValueError(
                "info_keywords become columns of the log, and need names of printable characters "
                f"without commas, or spaces around them, got {name!r}"
            )
    if len(set(keywords)) < len(keywords):
        raise ValueError(f"info_keywords must name each number once, got {' '.join(keywords)}")


def final_info_of(env: Any) -> FinalInfo:
    """Returns what the environments gave with the games that ended in the step before."""
    given: FinalInfo = getattr(env, "final_info", {})
    return given


def gives_info(env: Any) -> bool:
    """Returns whether a VecEnv has the attribute final_info, which it need not have."""
    return hasattr(env, "final_info")


def write_numbers(row: np.ndarray, info: FinalInfo, keyword: str) -> None:
    """Writes a keyword's number for each environment to row, float32 [E]; NaN where no game ended,
    or its info has no such number.
    """
    row[...] = math.nan
    for index, of_game in info.items():
        row[index] = _number(of_game.get(keyword))


def numbers_of_games(info: FinalInfo, keywords: Sequence[str], games: Sequence[int]) -> np.ndarray:
    """Returns float32 [N, K]: the numbers of K keywords of N games that ended, by the indices of
    their environments; NaN where an info has no such number.
    """
    rows = np.full((len(games), len(keywords)), math.nan, np.float32)
    for row, index in zip(rows, games, strict=True):
        of_game = info.get(index, {})
        row[...] = [_number(of_game.get(keyword)) for keyword in keywords]
    return rows


def _number(value: Any) -> float:
    """Returns a number, or the only entry of an array of numbers; NaN for anything else."""
    try:
        array = np.asarray(value)
    except Exception:  # an object with an interface of its own: a log is no reason to end a run
        return math.nan
    return float(array.item()) if array.size == 1 and array.dtype.kind in "biuf" else math.nan


def joined_info(parts: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Returns the numbers of all parts, by keyword."""
    joined: dict[str, list[float]] = {}
    for part in parts:
        for name, numbers in part.items():
            joined.setdefault(name, []).extend(numbers)
    return joined
