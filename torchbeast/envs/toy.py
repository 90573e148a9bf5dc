# SPDX-License-Identifier: Apache-2.0
"""Toy tasks that are learnt in seconds, and Mock, an environment of constant cost; all E
environments are stepped by a few numpy operations.

Catch and Memory are modelled on tasks of bsuite (Osband et al. 2019, arXiv:1908.03568), BitFlip on
the task of Andrychowicz et al. 2017 (arXiv:1707.01495, section 3.1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from torchbeast.core.envs.contract import OwnVecEnv, VecStep
from torchbeast.core.envs.spaces import ArrayNest, ArraySpec, Discrete, MultiDiscrete
from torchbeast.core.envs.sync_vec_env import check_actions, environment_seeds
from torchbeast.envs.spec import EnvError


class _Toy(OwnVecEnv, ABC):
    """Common base of the tasks: a random generator per environment, and episodes of one length."""

    action_space: Discrete | MultiDiscrete

    def __init__(self, num_envs: int, episode_length: int) -> None:
        self.env_id, self.num_envs = type(self).__name__, num_envs
        self._episode_length = episode_length
        self._time = np.zeros(num_envs, np.int64)  # steps of the episodes

    def reset(self, seed: int) -> ArrayNest:
        self._seeds = np.array(environment_seeds(seed, self.num_envs))
        self._generators = [np.random.default_rng(env_seed) for env_seed in self._seeds]
        self._begin(np.arange(self.num_envs))
        return self._observation()

    def step(self, action: ArrayNest) -> VecStep:
        chosen = check_actions(action, self.action_space, self.num_envs)
        self._time += 1
        ended = self._time == self._episode_length
        reward = self._reward(chosen, ended).astype(np.float32)
        self._begin(np.flatnonzero(ended))
        return VecStep.of_games(self._observation(), reward, ended)

    def _draw(self, envs: np.ndarray, n: int) -> list[int]:
        """Draws a number in 0, ..., n - 1 for each environment index in `envs`."""
        return [int(self._generators[env].integers(n)) for env in envs]

    def _begin(self, envs: np.ndarray) -> None:
        """Begins episodes in these environments."""
        self._time[envs] = 0

    @abstractmethod
    def _reward(self, chosen: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """Executes actions, int64 [E, ...]; returns the rewards [E]. ended: bool [E]."""

    @abstractmethod
    def _observation(self) -> ArrayNest:
        """Returns the observations of all environments, once for each reset or step."""


def _check_at_least(minimum: int, **values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or value < minimum:
            raise EnvError(f"{name} must be an integer of at least {minimum}, got {value!r}")


class Catch(_Toy):
    """Catching a ball that falls through 10 rows and 5 columns with a paddle in the last row.

    Observation: float32 [rows, columns], 1 where ball and paddle are, else 0. Actions: left, stay,
    right. Reward: after rows - 1 steps, when the episode ends, 1 for a caught ball and -1 for a
    lost one; else 0. The mean return is about -0.6 for random actions and 1 for the best policy.
    """

    def __init__(self, num_envs: int, rows: int = 10, columns: int = 5) -> None:
        _check_at_least(2, rows=rows)
        _check_at_least(1, columns=columns)
        super().__init__(num_envs, episode_length=rows - 1)
        self.rows, self.columns = rows, columns
        self.observation_space = ArraySpec((rows, columns), "float32")
        self.action_space = Discrete(3)
        self._ball, self._paddle = np.zeros((2, num_envs), np.int64)

    def _reward(self, chosen: np.ndarray, ended: np.ndarray) -> np.ndarray:
        self._paddle = np.clip(self._paddle + chosen - 1, 0, self.columns - 1)
        return np.where(ended, np.where(self._paddle == self._ball, 1, -1), 0)

    def _begin(self, envs: np.ndarray) -> None:
        """Starts episodes: the ball in a random column of row 0, the paddle in the middle."""
        super()._begin(envs)
        self._ball[envs] = self._draw(envs, self.columns)
        self._paddle[envs] = self.columns // 2

    def _observation(self) -> np.ndarray:
        board = np.zeros((self.num_envs, self.rows, self.columns), np.float32)
        every = np.arange(self.num_envs)
        board[every, self._time, self._ball] = 1
        board[every, -1, self._paddle] = 1
        return board


class Memory(_Toy):
    """Recalling a cue shown once at the start; a policy without memory has a mean return of 0.

    Observation: float32 [3] = (fraction of the episode that is left, cue, question). The cue is -1
    or 1 in an episode's first observation and 0 later; the question is 1 in the last observation
    before the episode ends. Actions: 0 answers -1, 1 answers 1, and only the last one counts.
    Reward: with the last action, 1 for the right answer and -1 for the wrong one; else 0.
    """

    def __init__(self, num_envs: int, episode_length: int = 8) -> None:
        _check_at_least(2, episode_length=episode_length)
        super().__init__(num_envs, episode_length)
        self.observation_space = ArraySpec((3,), "float32")
        self.action_space = Discrete(2)
        self._cue = np.zeros(num_envs, np.int64)

    def _reward(self, chosen: np.ndarray, ended: np.ndarray) -> np.ndarray:
        return np.where(ended, np.where(chosen == self._cue, 1, -1), 0)

    def _begin(self, envs: np.ndarray) -> None:
        super()._begin(envs)
        self._cue[envs] = self._draw(envs, 2)

    def _observation(self) -> np.ndarray:
        left = 1 - self._time / self._episode_length
        cue = np.where(self._time == 0, 2 * self._cue - 1, 0)
        question = self._time == self._episode_length - 1
        return np.stack([left, cue, question], axis=1).astype(np.float32)


class Dials(_Toy):
    """Setting three dials of 3, 4 and 5 positions at once as each observation shows.

    Observation: float32 [12], the three wanted positions one-hot, one after the other. Actions:
    MultiDiscrete, a position for each dial. Reward: 1/10 for each step in which all three are
    right; else 0. An episode has ten steps. The mean return is 1/60 for random actions, at most 1/3
    for a policy that sets one dial at random and the others right, and 1 for the best policy.
    """

    positions = (3, 4, 5)

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, episode_length=10)
        self.observation_space = ArraySpec((sum(self.positions),), "float32")
        self.action_space = MultiDiscrete(self.positions)

    def _reward(self, chosen: np.ndarray, ended: np.ndarray) -> np.ndarray:
        return (chosen == self._wanted).all(axis=1) / self._episode_length

    def _observation(self) -> np.ndarray:
        """Draws new wanted positions, int64 [E, 3], and shows them."""
        every = np.arange(self.num_envs)
        self._wanted = np.stack([self._draw(every, n) for n in self.positions], axis=1)
        shown = [
            np.eye(n, dtype=np.float32)[self._wanted[:, i]] for i, n in enumerate(self.positions)
        ]
        return np.concatenate(shown, axis=1)


class BitFlip(_Toy):
    """Setting bits to a goal, by flipping one with each action; reaching it is all that pays.

    Observation: a dict of float32 [bits], zeros and ones: observation and achieved_goal, which are
    the bits, and desired_goal. Bits and goal are random at first, and differ. Reward: 0 with the
    step that reaches the goal, which ends the episode, else -1. After `bits` steps it is truncated.
    """

    def __init__(self, num_envs: int, bits: int = 10) -> None:
        _check_at_least(1, bits=bits)
        super().__init__(num_envs, episode_length=bits)
        self.bits = bits
        leaf = ArraySpec((bits,), "float32", low=0, high=1)
        self.observation_space = {
            name: leaf for name in ("achieved_goal", "desired_goal", "observation")
        }
        self.action_space = Discrete(bits)
        self._bits, self._goal = np.zeros((2, num_envs, bits), np.float32)

    def step(self, action: ArrayNest) -> VecStep:
        chosen = check_actions(action, self.action_space, self.num_envs)
        self._time += 1
        late = self._time == self.bits
        reward = self._reward(chosen, late)
        terminated = self.compute_terminated(self._bits, self._goal, {})
        truncated = late & ~terminated
        ended, cut = terminated | truncated, np.flatnonzero(truncated)
        final = self._observation(cut) if len(cut) else None
        self._begin(np.flatnonzero(ended))
        return VecStep(self._observation(), reward, terminated, truncated, ended, final)

    def _reward(self, chosen: np.ndarray, ended: np.ndarray) -> np.ndarray:
        every = np.arange(self.num_envs)
        self._bits[every, chosen] = 1 - self._bits[every, chosen]
        return self.compute_reward(self._bits, self._goal, {})

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, info: object) -> np.ndarray:
        """Returns rewards float32 [N] of goals [N, bits]."""
        return self.compute_terminated(achieved, desired, info).astype(np.float32) - 1

    def compute_terminated(
        self, achieved: np.ndarray, desired: np.ndarray, info: object
    ) -> np.ndarray:
        """Returns which goals [N, bits] are reached, bool [N]."""
        return (achieved == desired).all(axis=1)

    def _begin(self, envs: np.ndarray) -> None:
        super()._begin(envs)
        for env in envs:
            generator = self._generators[env]
            self._bits[env] = generator.integers(2, size=self.bits)
            self._goal[env] = self._bits[env]
            while (self._goal[env] == self._bits[env]).all():
                self._goal[env] = generator.integers(2, size=self.bits)

    def _observation(self, envs: slice | np.ndarray = slice(None)) -> ArrayNest:
        bits = self._bits[envs]
        return {
            "achieved_goal": bits.copy(),
            "desired_goal": self._goal[envs].copy(),
            "observation": bits.copy(),
        }


class Mock(_Toy):
    """An environment with the spaces of an Atari game, four stacked frames, and known content.

    Every byte of an observation is (seed of the environment + step of the episode) % 256, every
    reward is 1, and every episode ends after episode_length steps.
    """

    def __init__(self, num_envs: int, episode_length: int = 200) -> None:
        _check_at_least(1, episode_length=episode_length)
        super().__init__(num_envs, episode_length)
        self.observation_space = ArraySpec((4, 84, 84), "uint8")
        self.action_space = Discrete(6)

    def _reward(self, chosen: np.ndarray, ended: np.ndarray) -> np.ndarray:
        return np.ones(self.num_envs)

    def _observation(self) -> np.ndarray:
        """Returns the observations, uint8 [E, 4, 84, 84]."""
        values = ((self._seeds + self._time) % 256).astype(np.uint8)
        return np.repeat(values, 4 * 84 * 84).reshape(self.num_envs, 4, 84, 84)
