# SPDX-License-Identifier: Apache-2.0
"""A replay of rollouts by priority, as in R2D2 (Kapturowski et al. 2019).

Windows of T + 1 rows begin where rollouts do, and with burn-in also between:

    rollouts    0 . . . . . . . T                stride = gcd(T, burn_in) = 4 for T = 8, burn_in = 4
                                0 . . . . . . . T
    windows     |-------|=======|                - burn-in, = trained on
                        |-------|=======|        so each step is trained on in some window

As each rollout arrives, the windows that it completes get the priority that the update with this
rollout has computed for it. Windows cross the borders of episodes; none has to be complete.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from torchbeast.core.storages.replay.rollout_replay import Priorities, RolloutReplay, Window
from torchbeast.core.storages.replay.store import Arrays
from torchbeast.core.storages.replay.trajectories import Trajectory
from torchbeast.core.storages.replay.transition_replay import SumTree, bytes_per_entry, raised


class WindowSampling(NamedTuple):
    """How windows are sampled.

    Attributes:
        priority_exponent: alpha: 0 samples uniformly, 1 in proportion to the priorities.
        burn_in: Steps at the beginning of a window that are not trained on.
    """

    priority_exponent: float
    burn_in: int

    def extra_bytes(self, capacity: int) -> int:
        """Returns the bytes that a transition takes in addition to its row."""
        return bytes_per_entry(capacity)


class PrioritisedRollouts(RolloutReplay):
    """Rollouts of any number of environments, of which windows are sampled by priority."""

    _tree: SumTree  # of ring rows with which windows begin

    def __init__(
        self,
        fields: Mapping[str, Any],
        capacity: int,
        frame_stack: int,
        seed: int,
        sampling: WindowSampling,
    ) -> None:
        """Reserves memory; see RolloutStore."""
        self._alpha = sampling.priority_exponent
        self._stride = math.gcd(fields["reward"].shape[0] - 1, sampling.burn_in)
        super().__init__(fields, capacity, frame_stack, seed)

    def insert(
        self, arrays: Arrays, columns: slice, agent: int, priorities: Priorities | None = None
    ) -> None:
        """Stores columns of a batch, and sets the priorities of windows; see RolloutReplay."""
        assert priorities is not None
        every = range(*columns.indices(arrays["reward"].shape[1]))
        for column, priority in zip(every, priorities.inserted, strict=True):
            super().insert(arrays, slice(column, column + 1), agent)
            self._open_windows(self._open[agent, int(arrays["env_index"][0, column])], priority)
        is_stored = priorities.windows >= self._ring.rows.start
        rows = priorities.windows[is_stored] % self._ring.num_rows
        self._tree.set(rows, raised(priorities.read[is_stored], self._alpha))

    def _open_windows(self, trajectory: Trajectory, priority: float) -> None:
        """Gives the windows that end in a trajectory's newest chunk their first priority."""
        last = trajectory.end - self.unroll_length - 1
        first = max(self._oldest(trajectory), trajectory.end - 2 * self.unroll_length)
        if len(starts := np.arange(last, first - 1, -self._stride)):
            rows = self._ring.ring_rows_at(trajectory, starts)
            self._tree.set(rows, raised(np.full(len(rows), priority), self._alpha))

    def draw(self) -> Window:
        """Returns a window, drawn by priority. LookupError when there is none."""
        while self._tree.total:
            target = np.array([self._generator.random() * self._tree.total])
            row = int(self._tree.find(target)[0])
            stored = self._ring.rows.start
            window = self._window(stored + (row - stored) % self._ring.num_rows)
            if window is not None:
                return window
            self._tree.set(np.array([row]), 0.0)
        raise LookupError("the replay has no complete rollout yet")

    def ratio(self, window: Window) -> float:
        """Returns the probability of drawing a window, in units of uniform sampling's, as if all
        stored windows were complete.
        """
        row = np.array([self.name(window) % self._ring.num_rows])
        share = float(self._tree.priorities(row)[0]) / self._tree.total
        return share * self.size / self._stride

    def _window(self, row: int) -> Window | None:
        """Returns the window that begins with a row; None if its first stack is not stored."""
        trajectory, position = self._ring.locate(row)
        done, first = self._ring.fields["done"], position
        while first > position - self.frame_stack + 1:
            if done[trajectory.row(first) % self._ring.num_rows]:
                break
            first -= 1
            if first < self._oldest(trajectory):
                return None
        return Window(trajectory, first, position)

    def _oldest(self, trajectory: Trajectory) -> int:
        """Returns the position of a trajectory's oldest row that is stored."""
        return max(trajectory.start, self.unroll_length - 1)

    # --- what a RolloutStore asks for

    def _clear_sampling(self) -> None:
        super()._clear_sampling()
        self._tree = SumTree(self._ring.num_rows)

    def _note_rows(self, trajectory: Trajectory) -> None:
        rows = self._ring.ring_rows(trajectory.chunks[-1])
        self._tree.set(np.arange(rows.start, rows.stop), 0.0)

    def _sampling_state(self) -> tuple[dict[str, Any], np.ndarray | None]:
        rows = np.array(self._ring.rows, np.int64) % self._ring.num_rows
        return {}, self._tree.priorities(rows)

    def _restore_sampling(self, state: dict[str, Any], numbers: np.ndarray | None) -> None:
        rows = np.array(self._ring.rows, np.int64) % self._ring.num_rows
        if numbers is not None and len(rows):
            self._tree.set(rows, numbers[len(numbers) - len(rows) :])


def rollout_replay(
    fields: Mapping[str, Any],
    capacity: int,
    frame_stack: int,
    seed: int,
    sampling: WindowSampling | None,
) -> RolloutReplay:
    """Returns a replay of rollouts, by priority if there is a sampling; see RolloutStore."""
    if sampling is None:
        return RolloutReplay(fields, capacity, frame_stack, seed)
    return PrioritisedRollouts(fields, capacity, frame_stack, seed, sampling)
