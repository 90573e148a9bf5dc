# SPDX-License-Identifier: Apache-2.0
"""Samples windows of T + 1 rows from a replay, drawn one by one or walked along."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torchbeast.core.storages.replay_file import integer
from torchbeast.core.storages.stored_tracks import StoredTracks
from torchbeast.core.storages.tracks import Track


class Window(NamedTuple):
    """T + 1 consecutive rows of a track."""

    track: Track
    episode: int  # position of the episode's first row
    position: int  # position of the window's first row

    @property
    def begins(self) -> bool:
        """Whether the first row is the episode's: the recurrent state before it is zero."""
        return self.position == self.episode


class EpisodeSampler:
    """Draws episodes uniformly from those that are stored.

    Episodes are named by their first rows. A walk is the next window's episode and the steps that
    lie before it.
    """

    def __init__(self, stored: StoredTracks, unroll_length: int, seed: int) -> None:
        self._stored = stored
        self._unroll_length = unroll_length
        self._generator = np.random.default_rng(seed)
        self._walks: dict[tuple[int, int], tuple[int, int]] = {}  # by agent and number

    def draw(self) -> Window:
        """Returns a window of any episode that begins at any of its rows for which T rows after it
        are stored; both are drawn uniformly. LookupError when there is no episode.
        """
        track, start, length = self._locate(self._draw_episode())
        starts = min(length, track.end - self._unroll_length - start)
        return Window(track, start, start + int(self._generator.integers(starts)))

    def walk(self, agent: int, number: int) -> Window:
        """Returns the next window of a walk of an agent, T rows after the last one.

        The walk goes on at the beginning of another episode where its own is over or overwritten,
        or no T rows are stored any further. LookupError when there is no episode.
        """
        row, before = self._walks.get((agent, number), (-1, 0))
        if not self._goes_on(row, before):
            row, before = self._draw_episode(), 0
        self._walks[agent, number] = row, before + self._unroll_length
        track, start, _ = self._locate(row)
        return Window(track, start, start + before)

    def forget_walks(self, agent: int) -> None:
        """Lets every walk of an agent begin with another episode."""
        self._walks = {key: walk for key, walk in self._walks.items() if key[0] != agent}

    def clear(self) -> None:
        """Forgets all walks."""
        self._walks.clear()

    def state(self) -> dict[str, Any]:
        """Returns the walks and the random generator's state, as JSON values."""
        walks = [[*key, *walk] for key, walk in self._walks.items()]
        return {"walks": walks, "generator": self._generator.bit_generator.state}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over a state."""
        self._walks = {
            (integer(agent), integer(number)): (integer(row), integer(before))
            for agent, number, row, before in state["walks"]
        }
        self._generator.bit_generator.state = state["generator"]

    def _goes_on(self, row: int, before: int) -> bool:
        if row not in self._stored.episodes:
            return False
        track, start, length = self._locate(row)
        return before < length and start + before + self._unroll_length < track.end

    def _draw_episode(self) -> int:
        if not len(self._stored.episodes):
            raise LookupError("the replay has no complete episode yet")
        return self._stored.episodes.draw(self._generator)

    def _locate(self, row: int) -> tuple[Track, int, int]:
        """Returns the track of an episode, the position of its first row, and its length."""
        return *self._stored.locate(row), self._stored.episodes.length(row)
