# SPDX-License-Identifier: Apache-2.0
"""A replay of whole episodes, of which windows of T + 1 consecutive rows are sampled, as in LASER
(Schmitt, Hessel, Simonyan 2019, arXiv 1909.11583).

    insert    columns [T+1, B] --> rows 1..T, newest frames only --> ring of chunks (RolloutStore)
    draw      one of the complete episodes, then one of its rows, both uniformly
    walk      an episode from its first row on, T rows at a time
    read      rows of the ring, stacks rebuilt --> straight into a column [T+1] of a batch

An episode is what lies between two rows that are `done`. It can be sampled as soon as its end and
the T + 1 rows from its first one on are stored, until its first row is overwritten: first in, first
out. A window may run on into the environment's next episode, as rollouts do. A rollout's first
recurrent state is not stored; R2D2 has those of all rows among its extras.

By priority, as in R2D2 (Kapturowski et al. 2019), windows begin where rollouts do, and every
`stride` rows between, in any episode:

    rollouts    0 . . . . . . . T                   T = 8, burn-in of 4, stride = gcd(T, 4) = 4
                                0 . . . . . . . T
    windows     |-------|=======|                   - burn-in, = trained on
                        |-------|=======|           so each step is trained on in some window

A rollout gives the windows that it completes the priority that its first update has computed.

Thread safety: one thread makes all calls, but another may hold the lock and save the replay:
`insert` and `fill` hold it too. A window is valid until the next insert.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchbeast.core.base.nest import flatten
from torchbeast.core.envs.frame_stack import copy_runs, runs, shifted, stack_positions
from torchbeast.core.storages.replay.store import AGENT, Arrays, RolloutStore
from torchbeast.core.storages.replay.trajectories import Trajectory


class Window(NamedTuple):
    """T + 1 consecutive rows of a trajectory."""

    trajectory: Trajectory
    episode: int  # position of the episode's first row
    position: int  # position of the window's first row

    @property
    def begins(self) -> bool:
        """Whether the first row is the episode's: the recurrent state before it is zero."""
        return self.position == self.episode


class ByPriority(NamedTuple):
    """How windows are drawn by priority.

    Attributes:
        exponent: alpha: 0 draws uniformly, 1 in proportion to the priorities.
        stride: Rows from a window to the next, a divisor of T.
    """

    exponent: float
    stride: int


class Priorities(NamedTuple):
    """Priorities of an update's columns, such as sizes of their TD errors.

    Attributes:
        inserted: [B], of columns that are inserted.
        windows: int64 [S], names of windows that were read for the update.
        read: [S], priorities of these windows.
    """

    inserted: np.ndarray
    windows: np.ndarray
    read: np.ndarray


class ReplayedColumns(NamedTuple):
    """Columns that were read from a replay."""

    begins: list[bool]  # by column: whether its first row is an episode's
    finals: list[np.ndarray]  # final observations, leaves [K, *shape], by column, then row
    windows: np.ndarray  # int64 [S] names, for Priorities
    ratios: np.ndarray  # float32 [S], see RolloutReplay.ratio


NO_ROLLOUT = -1  # the rollout_index of a window


class RolloutReplay(RolloutStore):
    """Rollouts joined to episodes, at most `capacity` transitions.

        replay.insert(arrays)
        columns = replay.fill(batch, slice(8, 16), first_walk=None)

    `arrays` and `batch` are dicts of numpy arrays [T+1, B, ...] by field of Rollout, and may be
    views of torch's memory. Walks are not saved: the recurrent states that belong to them are not.
    """

    def __init__(
        self,
        fields: Arrays,
        capacity: int,
        frame_stack: int = 1,
        seed: int = 0,
        by_priority: ByPriority | None = None,
    ) -> None:
        """Reserves memory; see RolloutStore. by_priority: how to draw; None: uniformly."""
        self._by_priority = by_priority
        exponent = None if by_priority is None else by_priority.exponent
        super().__init__(fields, capacity, frame_stack, seed, exponent)

    def insert(
        self, arrays: Arrays, agent: int = AGENT, *, priorities: Priorities | None = None
    ) -> None:
        """Stores a batch of rollouts, see RolloutStore, and sets priorities."""
        with self.lock:
            if priorities is None:
                super().insert(arrays, agent)
                return
            inserted = self._inserted(arrays, agent)
            for trajectory, priority in zip(inserted, priorities.inserted, strict=True):
                self._open_windows(trajectory, priority)
            self._set_priorities(priorities.windows, priorities.read)

    def _open_windows(self, trajectory: Trajectory, priority: float) -> None:
        """Gives the windows that end in a trajectory's newest chunk their first priority."""
        assert self._by_priority is not None
        last = trajectory.end - self.unroll_length - 1
        first = max(self._oldest(trajectory), trajectory.end - 2 * self.unroll_length)
        positions = range(last, first - 1, -self._by_priority.stride)
        names = np.array([trajectory.row(position) for position in positions], np.int64)
        self._set_priorities(names, np.full(len(names), priority))

    def _clear_sampling(self) -> None:
        # The next window of each walk, by agent and number: the first row of its episode, and the
        # steps that lie before the window.
        self._walks: dict[tuple[int, int], tuple[int, int]] = {}

    # --- sampling

    def fill(
        self, batch: Arrays, columns: slice, first_walk: int | None, agent: int = AGENT
    ) -> ReplayedColumns | None:
        """Writes a window into each of these columns of a batch. Returns None until the replay
        holds a complete episode, or by priority a complete rollout.

        first_walk: number of the walk that continues in the first column; the walks after it
            continue in the columns after it. None: any windows, for a network without memory.
        agent: number of the agent that learns from them.
        """
        windows: list[Window] = []
        finals: list[list[np.ndarray]] = []  # by column, then row: leaves
        with self.lock:
            for number, column in enumerate(range(columns.start, columns.stop)):
                try:
                    walk = None if first_walk is None else first_walk + number
                    windows.append(self.draw() if walk is None else self.walk(agent, walk))
                except LookupError:
                    return None
                finals += self.read(windows[-1], batch, column)
            return ReplayedColumns(
                [window.begins for window in windows],
                [np.stack(leaf) for leaf in zip(*finals, strict=True)],
                np.array([self.name(window) for window in windows], np.int64),
                np.array([self.ratio(window) for window in windows], np.float32),
            )

    def close(self) -> None:
        """Does nothing, because calls only wait until the replay is saved."""

    def draw(self) -> Window:
        """Returns a window that begins at any row of any episode, both drawn uniformly, for which T
        rows after it are stored; or one by priority. LookupError when there is none.
        """
        if self._by_priority is not None:
            return self._draw_by_priority()
        trajectory, start, length = self._locate(self._draw_episode())
        starts = min(length, trajectory.end - self.unroll_length - start)
        return Window(trajectory, start, start + int(self._generator.integers(starts)))

    def walk(self, agent: int, number: int) -> Window:
        """Returns the next window of a walk through an episode, T rows after the last one.

        agent, number: of the agent that learns from it, and of its walk. The episode may be
        another agent's.

        Where the episode is over or overwritten, or no T rows are stored any further, the walk goes
        on at the beginning of another (`Window.begins`). LookupError when there is no episode.
        """
        row, before = self._walks.get((agent, number), (-1, 0))
        if not self._goes_on(row, before):
            row, before = self._draw_episode(), 0
        self._walks[agent, number] = row, before + self.unroll_length
        trajectory, start, _ = self._locate(row)
        return Window(trajectory, start, start + before)

    def name(self, window: Window) -> int:
        """Returns the number of a window's first row, which is never used again."""
        return window.trajectory.row(window.position)

    def ratio(self, window: Window) -> float:
        """Returns the probability of drawing a window by priority, in units of uniform drawing's,
        as if all stored windows were complete.
        """
        if self._by_priority is None:
            return 1.0
        priority = self._tree.priorities(np.array(self.name(window) % self._ring.num_rows))
        return float(priority) / self._tree.total * self.size / self._by_priority.stride

    def _draw_by_priority(self) -> Window:
        while self._tree.total:
            target = np.array([self._generator.random() * self._tree.total])
            row = self._tree.find(target)
            stored = self._ring.rows.start
            window = self._window(stored + (int(row[0]) - stored) % self._ring.num_rows)
            if window is not None:
                return window
            self._tree.set(row, 0.0)
        raise LookupError("the replay has no complete rollout yet")

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

    def forget_walks(self, agent: int) -> None:
        """Lets every walk of an agent go on at the beginning of another episode."""
        self._walks = {key: walk for key, walk in self._walks.items() if key[0] != agent}

    def _goes_on(self, row: int, before: int) -> bool:
        if row not in self._ring.episodes:
            return False
        trajectory, start, length = self._locate(row)
        return before < length and start + before + self.unroll_length < trajectory.end

    def _draw_episode(self) -> int:
        if not len(self._ring.episodes):
            raise LookupError("the replay has no complete episode yet")
        return self._ring.episodes.draw(self._generator)

    def _locate(self, row: int) -> tuple[Trajectory, int, int]:
        """Returns the trajectory of an episode, the position of its first row, and its length."""
        return *self._ring.locate(row), self._ring.episodes.length(row)

    # --- reading

    def read(self, window: Window, batch: Arrays, column: int) -> list[list[np.ndarray]]:
        """Writes a window into a column of a batch, and returns the leaves of the final
        observations of the truncations in its rows 1..T, in order.

        batch: the fields that were inserted. `rollout_index` becomes NO_ROLLOUT.
        """
        positions = np.arange(window.position, window.position + self.unroll_length + 1)
        rows = runs(self._ring.ring_rows_at(window.trajectory, positions))
        leaves = flatten({name: batch[name] for name in self._ring.fields})
        for leaf, source in zip(leaves, self._ring.others, strict=True):
            copy_runs(leaf[:, column], source, rows)
        batch["env_index"][:, column] = window.trajectory.env_index
        batch["rollout_index"][:, column] = NO_ROLLOUT
        starts = np.where(batch["done"][:, column], positions, window.episode)
        frames = stack_positions(positions, np.maximum.accumulate(starts), self.frame_stack)
        stacks = [leaf[:, column] for leaf in flatten(batch["observation"])]
        self._read_stacks(self._ring.ring_rows_at(window.trajectory, frames), stacks)
        self.sampled += self.unroll_length
        return self._finals(window, batch["truncated"][:, column], stacks)

    def _read_stacks(self, frame_rows: np.ndarray, stacks: list[np.ndarray]) -> None:
        """Copies frames to stacks [T+1, k * C, ...]; frame_rows: their ring rows [T+1, k]."""
        by_place = [runs(rows) for rows in frame_rows.T]
        for stack, frames in zip(stacks, self._ring.frames, strict=True):
            places = stack.reshape(*frame_rows.shape, *frames.shape[1:])  # a view
            for place, rows in enumerate(by_place):
                copy_runs(places[:, place], frames, rows)

    def _finals(
        self, window: Window, truncated: np.ndarray, stacks: list[np.ndarray]
    ) -> list[list[np.ndarray]]:
        """Returns the final observations of truncations in rows 1..T; truncated: [T+1]."""
        finals = []
        for row in (1 + np.flatnonzero(truncated[1:])).tolist():
            newest = self._ring.final(window.trajectory.row(window.position + row))
            pairs = zip(stacks, newest, strict=True)
            whole = [shifted(old[row - 1 : row], new[None], self.frame_stack) for old, new in pairs]
            finals.append([leaf[0] for leaf in whole])
        return finals
