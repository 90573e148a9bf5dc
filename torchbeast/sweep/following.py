# SPDX-License-Identifier: Apache-2.0
"""Follows an agent through the files of its run: how far it is, and what it achieves."""

from __future__ import annotations

import collections
import contextlib
import csv
import json
import math
from pathlib import Path
from typing import NamedTuple

from torchbeast.reporting.log_files import read_fields

_NEEDED = ("_tick", "step", "episodes", "mean_episode_return")


class Figures(NamedTuple):
    """The figures of an agent at one moment."""

    step: int = 0
    episodes: int = 0
    mean_return: float = math.nan  # of the last episodes; NaN: none has ended


class RecentReturns:
    """The mean return of the last episodes, from means over those that ended in a batch."""

    def __init__(self, episodes: int) -> None:
        """Prepares the mean over so many episodes, or somewhat more: batches are not divided."""
        self._wanted = episodes
        self._batches: collections.deque[tuple[float, int]] = collections.deque()
        self._count = 0

    def add(self, mean: float, episodes: int) -> None:
        """Adds the mean over the episodes of a batch."""
        self._batches.append((mean, episodes))
        self._count += episodes
        while self._count - self._batches[0][1] >= self._wanted:
            self._count -= self._batches.popleft()[1]

    def mean(self) -> float:
        """Returns the mean; NaN if no episode has ended."""
        total = sum(mean * episodes for mean, episodes in self._batches)
        return total / self._count if self._count else math.nan


def _cells(line: str) -> list[str]:
    """Returns the cells of a line; [] for one that is damaged, as by a disk that was full."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


class Follower:
    """Reads what an agent appends to logs.csv. Used by one thread.

    A resumed agent drops the rows after its checkpoint and counts on from there; then everything is
    read again.
    """

    def __init__(self, folder: Path, episodes: int) -> None:
        """Prepares reading; folder: of the run, which need not exist; episodes: in the mean."""
        self._folder, self._wanted = folder, episodes
        self._begin()

    def _begin(self) -> None:
        self._offset, self._tick = 0, -1
        self._returns = RecentReturns(self._wanted)
        self._columns: dict[str, int] = {}
        self.figures = Figures()

    def read(self) -> Figures:
        """Reads what is new; returns the newest figures."""
        rows = self._new_rows()
        if rows and self._tick >= 0 and rows[0][0] != str(self._tick + 1):
            self._begin()
            rows = self._new_rows()
        for row in rows:
            self._add(row)
        return self.figures

    def _new_rows(self) -> list[list[str]]:
        """Returns the whole rows after those that were read."""
        try:
            with open(self._folder / "logs.csv", "rb") as file:
                if self._offset > file.seek(0, 2):
                    self._begin()
                file.seek(self._offset)
                data = file.read()
        except OSError:  # there is none yet
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows = map(_cells, whole.decode(errors="replace").splitlines())
        return [row for row in rows if row and not row[0].startswith("#")]

    def _add(self, row: list[str]) -> None:
        """Adds the figures of a row; leaves out one that a killed agent did not complete."""
        if not all(name in self._columns for name in _NEEDED):  # columns are added at the right
            with contextlib.suppress(OSError, ValueError, csv.Error):
                self._columns = {name: i for i, name in enumerate(read_fields(self._folder))}
        cells = {name: row[i] for name, i in self._columns.items() if i < len(row)}
        with contextlib.suppress(KeyError, ValueError):
            tick, step = int(cells["_tick"]), int(cells["step"])
            self._add_figures(step, cells)
            self._tick = tick

    def _add_figures(self, step: int, cells: dict[str, str]) -> None:
        episodes = int(cells.get("episodes") or self.figures.episodes)
        if text := cells.get("mean_episode_return"):
            self._returns.add(float(text), max(1, episodes - self.figures.episodes))
        self.figures = Figures(step, episodes, self._returns.mean())


def is_complete(folder: Path, figures: Figures, total_steps: int) -> bool:
    """Returns whether a run has learnt all of its steps, and has written its last checkpoint."""
    return figures.step >= total_steps and has_ended_well(folder)


def has_ended_well(folder: Path) -> bool:
    """Returns whether a run has written its last checkpoint."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(meta.get("successful"))
