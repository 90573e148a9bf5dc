# SPDX-License-Identifier: Apache-2.0
"""A replay of transitions, for off-policy algorithms.

    insert    columns [T+1, B] --> ring of chunks, newest frames only (RolloutStore)
    sample    steps of any trajectory, uniformly or by priority --> arrays [B, ...], stacks rebuilt

A transition is named by the row of its first step's outcome: row e holds its action and reward, the
row before e the observation that the action was chosen by. With n-step returns it continues through
the rows after e, until the episode ends, n steps are joined or nothing newer is stored.

    row         s          e         e+1       e+2
    holds   observation  action    action    action         n = 3: rewards of e, e+1, e+2
                         reward    reward    reward                next observation of e+2

A truncated episode bootstraps from its own final observation, which is stored next to the rows.

Thread safety: none; the caller makes one call at a time.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from torchbeast.core.base.checks import require
from torchbeast.core.base.nest import flatten, map_leaves, pack_as
from torchbeast.core.envs.contract import is_reset
from torchbeast.core.envs.frame_stack import shifted
from torchbeast.core.storages.replay.store import RolloutStore
from torchbeast.core.storages.replay.trajectories import Trajectory

_log = logging.getLogger("torchbeast.replay")


GOAL, ACHIEVED = "desired_goal", "achieved_goal"  # leaves of a goal environment's observation
_RUNNING = -1  # steps left in an episode whose end is not stored
_MOST_ROUNDS = 1000  # of drawing until enough transitions are whole

HindsightOutcome = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Takes achieved and desired goals [N, *shape]; returns rewards and terminated [N]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How transitions are sampled."""

    n_step: int
    """Most steps that a transition joins."""
    priority_exponent: float
    """alpha of Schaul et al. 2016: 0 samples uniformly, 1 in proportion to the priorities."""
    hindsight: HindsightOutcome | None
    """Says what would have happened with another goal; None: goals stay."""
    hindsight_share: float
    """Share of the sampled transitions that get another goal."""

    def extra_bytes(self, capacity: int) -> int:
        """Returns the bytes that a transition takes in addition to its row."""
        leaves = 1 << max(0, capacity - 1).bit_length() if self.priority_exponent else 0
        tree = -(-16 * leaves // capacity)  # two float64 for each leaf of the SumTree
        return tree + (4 if self.hindsight is not None else 0)


UNIFORM = Sampling(n_step=1, priority_exponent=0, hindsight=None, hindsight_share=0)


class Sample(NamedTuple):
    """Sampled transitions, numpy arrays [B, ...] as in Transitions."""

    names: np.ndarray  # int64 [B], for `set_priorities`
    observation: Any
    action: Any
    reward: np.ndarray
    later_rewards: np.ndarray  # float32 [B, n_step - 1]
    num_joined: np.ndarray  # int64 [B]
    terminated: np.ndarray
    next_observation: Any
    extras: dict[str, np.ndarray]
    policy_version: np.ndarray  # int64 [B]
    probabilities: np.ndarray  # float64 [B], up to a factor that all have in common


class TransitionReplay(RolloutStore):
    """Transitions of any number of environments, at most `capacity`.

    replay = TransitionReplay(fields, capacity, sampling=sampling)
    replay.insert(arrays)
    sample = replay.sample(256)
    """

    _highest: float  # priority of what was not sampled yet
    _left: np.ndarray  # int32 [ring rows] steps to the end of the row's episode

    def __init__(
        self,
        fields: Mapping[str, Any],
        capacity: int,
        frame_stack: int = 1,
        seed: int = 0,
        sampling: Sampling = UNIFORM,
    ) -> None:
        """Reserves memory; see RolloutStore. hindsight needs what `check_goals` asks for."""
        self._how = sampling
        super().__init__(fields, capacity, frame_stack, seed, sampling.priority_exponent or None)

    def sample(self, count: int) -> Sample:
        """Returns transitions drawn with replacement.

        Raises LookupError when none is stored, or hardly one is whole.
        """
        names, starts = self._draw(count)
        rewards, num_joined, last = self._joined(names)
        observation = self._observations(self._stack_rows(starts))
        ring_rows = self._ring_rows(names)
        is_uniform = self._exponent is None
        drawn = Sample(
            names=names,
            observation=observation,
            action=self._rows_of("action", names),
            reward=rewards[:, 0],
            later_rewards=rewards[:, 1:],
            num_joined=num_joined,
            terminated=self._rows_of("done", last) & ~self._rows_of("truncated", last),
            next_observation=self._next_observations(last),
            extras=self._rows_of("extras", names),
            policy_version=self._rows_of("policy_version", names),
            probabilities=np.ones(count) if is_uniform else self._tree.priorities(ring_rows),
        )
        self.sampled += count
        return self._with_other_goals(drawn, starts)

    def set_priorities(self, names: np.ndarray, priorities: np.ndarray) -> None:
        """Sets the priorities [N] of sampled transitions by the sizes of their errors. Whatever has
        overwritten one keeps its own.
        """
        self._highest = max(self._highest, self._set_priorities(names, priorities))

    # --- drawing

    def _draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns transitions, and the rows before them [count]."""
        whole: list[tuple[np.ndarray, np.ndarray]] = []
        missing = count
        for _ in range(_MOST_ROUNDS if self.size else 0):
            names = self._draw_rows(missing)
            starts = self._ring.rows_beside(names, -1)
            is_whole = self._is_whole(names, starts)
            whole.append((names[is_whole], starts[is_whole]))
            if self._exponent is not None:  # they stay so, and would be drawn again and again
                self._tree.set(self._ring_rows(names[~is_whole]), 0.0)
            missing -= int(is_whole.sum())
            if not missing:
                names, starts = (np.concatenate(parts) for parts in zip(*whole, strict=True))
                return names, starts
        raise LookupError(
            f"the replay has no complete transition in {self.size} of {self.capacity} steps: "
            "increase its size"
        )

    def _draw_rows(self, count: int) -> np.ndarray:
        """Returns rows [count] of any stored chunks."""
        stored = self._ring.rows
        if self._exponent is None:
            return self._generator.integers(stored.start, stored.stop, count)
        places = np.arange(count) + self._generator.random(count)  # stratified
        ring_rows = self._tree.find(places / count * self._tree.total)
        return stored.start + self._ring_rows(ring_rows - stored.start)

    def _is_whole(self, names: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Returns whether rows name transitions of which everything is stored."""
        known: np.ndarray = (starts >= 0) & ~self._ring.begin_trajectories(names)
        known[known] = (self._stack_rows(starts[known]) >= 0).all(axis=1)
        return known & ~is_reset(*(self._rows_of(name, names) for name in ("done", "episode_step")))

    # --- reading

    def _ring_rows(self, rows: np.ndarray) -> np.ndarray:
        return rows % self._ring.num_rows

    def _rows_of(self, name: str, rows: np.ndarray) -> Any:
        """Returns a field of rows, leaves [N, ...]."""
        ring_rows = self._ring_rows(rows)
        return map_leaves(lambda leaf: leaf[ring_rows], self._ring.fields[name])

    def _joined(self, names: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns rewards float32 [N, n_step] of the steps of transitions, 0 behind the last step,
        their number int64 [N], and the row of the last one int64 [N].
        """
        last, count = names, np.ones(len(names), np.int64)
        rewards = np.zeros((len(names), self._how.n_step), np.float32)
        rewards[:, 0] = self._rows_of("reward", names)
        goes_on = np.ones(len(names), bool)
        for step in range(1, self._how.n_step):
            following = self._ring.rows_beside(last, 1)
            goes_on = goes_on & ~self._rows_of("done", last) & (following >= 0)
            last = np.where(goes_on, following, last)
            rewards[:, step] = np.where(goes_on, self._rows_of("reward", last), 0.0)
            count = count + goes_on
        return rewards, count, last

    def _stack_rows(self, rows: np.ndarray) -> np.ndarray:
        """Returns the rows [N, k] of the frames in the stacks of rows, oldest first; -1 where one
        is not stored.
        """
        stacks = np.empty((len(rows), self.frame_stack), np.int64)
        stacks[:, -1] = rows
        for place in range(self.frame_stack - 2, -1, -1):
            before = self._ring.rows_beside(rows, -1)
            # The rows before a trajectory's first are fillers; an episode's first repeats itself.
            before[self._ring.begin_trajectories(rows)] = -1
            rows = np.where(self._rows_of("done", rows), rows, before)
            stacks[:, place] = rows
        return stacks

    def _observations(self, stack_rows: np.ndarray) -> Any:
        """Returns observations, leaves [N, k * C, ...], of the rows [N, k] of their frames."""
        rows = self._ring_rows(stack_rows)
        if self.frame_stack == 1:
            return pack_as(
                self._specs["observation"], [all_[rows[:, 0]] for all_ in self._ring.frames]
            )
        frames = [all_[rows] for all_ in self._ring.frames]
        leaves = [leaf.reshape(len(rows), -1, *leaf.shape[3:]) for leaf in frames]
        return pack_as(self._specs["observation"], leaves)

    def _next_observations(self, last: np.ndarray) -> Any:
        """Returns the observations after the last steps of transitions, [N] rows."""
        is_end = self._rows_of("done", last)
        before = self._ring.rows_beside(last, -1)
        seen = np.where(is_end, before, last)  # next episodes begin at ends
        observations = self._observations(self._stack_rows(seen))
        cuts = np.flatnonzero(is_end & self._rows_of("truncated", last))
        for place in cuts.tolist():
            finals = self._ring.final(int(last[place]))
            for leaf, final in zip(flatten(observations), finals, strict=True):
                leaf[place] = shifted(leaf[place][None], final[None], self.frame_stack)[0]
        return observations

    # --- hindsight

    def _with_other_goals(self, drawn: Sample, starts: np.ndarray) -> Sample:
        """Returns transitions of which some have a goal that was achieved later in their episode
        (Andrychowicz et al. 2017, arXiv 1707.01495, strategy "future").

        Transitions that terminated keep their goal, because another goal's outcome is unknown, and
        so do transitions of running episodes.
        """
        if self._how.hindsight is None:
            return drawn
        if self.sampled == len(starts):  # the first sample
            self._compare(drawn, self._how.hindsight)
        share = self._how.hindsight_share
        left = self._left[self._ring_rows(starts)]
        chosen = self._generator.random(len(starts)) < share
        which = np.flatnonzero(chosen & (left != _RUNNING) & ~drawn.terminated)
        goals = self._achieved_later(starts[which], left[which].astype(np.int64))
        achieved = drawn.next_observation[ACHIEVED][which]
        rewards, terminated = self._how.hindsight(achieved, goals)
        for observation in (drawn.observation, drawn.next_observation):
            observation[GOAL][which] = goals
        drawn.reward[which], drawn.terminated[which] = rewards, terminated
        return drawn

    def _compare(self, drawn: Sample, hindsight: HindsightOutcome) -> None:
        """Warns if steps have other rewards than the environment computes for their goals."""
        kept = np.flatnonzero(~drawn.terminated)  # of the others the last observation is unknown
        goals = (drawn.next_observation[name][kept] for name in (ACHIEVED, GOAL))
        given, computed = drawn.reward[kept], hindsight(*goals)[0]
        differs = np.flatnonzero(~np.isclose(given, computed, rtol=1e-3, atol=1e-5))
        if len(differs):
            _log.warning(
                "%d of %d sampled steps have a different reward than compute_reward returns for "
                "their goals, for example %g instead of %g. Hindsight trains on both kinds of "
                "rewards: if a wrapper changes the reward, add a matching compute_reward to it",
                *(len(differs), len(kept), given[differs[0]], computed[differs[0]]),
            )

    def _achieved_later(self, rows: np.ndarray, left: np.ndarray) -> np.ndarray:
        """Returns goals [N, *shape] achieved after rows, each 1 to `left` steps later.

        left: steps to the episode's end [N], whose observation is known if it was truncated.
        """
        ends = self._ring.rows_ahead(rows, left)
        is_cut = self._rows_of("truncated", ends)
        steps = self._generator.integers(1, left + is_cut)
        chosen = self._ring.rows_ahead(rows, steps)
        achieved = pack_as(self._specs["observation"], self._ring.frames)[ACHIEVED]
        goals: np.ndarray = achieved[self._ring_rows(chosen)]
        for number in np.flatnonzero(steps == left).tolist():
            final = self._ring.final(int(ends[number]))
            goals[number] = pack_as(self._specs["observation"], final)[ACHIEVED]
        return goals

    # --- what a RolloutStore asks for

    def _clear_sampling(self) -> None:
        rows = self._ring.num_rows if self._how.hindsight is not None else 0
        self._left = np.zeros(rows, np.int32)
        self._highest = 1.0

    def _first_priority(self, trajectory: Trajectory) -> float:
        is_first = trajectory.overwritten + len(trajectory.chunks) == 1
        return 0.0 if is_first else self._highest

    def _note_rows(self, trajectory: Trajectory) -> None:
        if self._how.hindsight is not None:
            self._note_steps_left(
                trajectory, trajectory.end - self.unroll_length, trajectory.episode
            )

    def _note_steps_left(self, trajectory: Trajectory, first: int, episode: int | None) -> None:
        """Notes for the rows of a trajectory how many steps there are to the end of their episode.

        first: position from which on nothing is noted. episode: position of the first row of the
        episode that ran before; None: not known.
        """
        new = self._ring.ring_rows_at(trajectory, np.arange(first, trajectory.end))
        self._left[new] = _RUNNING
        start = max(trajectory.start, episode or 0)
        for end in (first + np.flatnonzero(self._ring.fields["done"][new])).tolist():
            positions = np.arange(start, end)
            if len(positions):
                self._left[self._ring.ring_rows_at(trajectory, positions)] = end - positions
            start = max(start, end)

    def _sampling_state(self) -> dict[str, Any]:
        return {"highest": self._highest}

    def _restore_sampling(self, state: dict[str, Any], has_priorities: bool) -> None:
        """Takes over the priorities; where none were saved, every transition has the same."""
        if self._exponent is not None and has_priorities:
            self._highest = float(state["highest"])
        elif self._exponent is not None:
            names = np.array(self._ring.rows, np.int64)
            priorities = np.where(self._ring.begin_trajectories(names), 0.0, self._highest)
            self._tree.set(self._ring_rows(names), priorities)
        if self._how.hindsight is not None:
            for trajectory in self._ring.trajectories([]):
                self._note_steps_left(trajectory, trajectory.start, None)


def check_goals(observation: Any, frame_stack: int) -> None:
    """Raises ValueError unless observations have goals that hindsight can change.

    observation: nest of ArraySpec. frame_stack: number of frames in every leaf.
    """
    names = sorted(observation) if isinstance(observation, Mapping) else []
    require(
        {GOAL, ACHIEVED} <= set(names),
        f"hindsight needs observations with {ACHIEVED} and {GOAL}, as in Gymnasium's goal "
        f"environments, got {names or 'no dict'}",
    )
    require(
        frame_stack == 1,
        f"hindsight needs single observations, but {frame_stack} frames are stacked",
    )


def importance_weights(probabilities: np.ndarray, beta: float) -> np.ndarray:
    """Returns w_i = (p_i / min p)^-beta, float32 [B]: the weights of Schaul et al. 2016, section
    3.4, divided by the largest of the batch.
    """
    weights = (probabilities / probabilities.min()) ** -beta
    return weights.astype(np.float32)
