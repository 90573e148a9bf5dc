# SPDX-License-Identifier: Apache-2.0
"""Stacks of the newest frames, rebuilt from single frames.

Environments send only new frames. The policy sees the newest k of them, concatenated along the
first dimension of each leaf, oldest first. The first frame of an episode is repeated k times, as in
the original's FrameStack wrapper. E is the number of environments, K the number of those truncated
in one step, C the first dimension of a leaf.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from torchbeast.core.envs.spaces import ArrayNest, ArraySpec, ObservationSpace
from torchbeast.core.nest_py import map_leaves, map_leaves2


class FrameStacker:
    """Keeps the newest num_frames observations of E environments as stacks.

        stack = stacker.reset(env.reset(seed))
        step = env.step(action)
        if step.final_observation is not None:      before push(), which drops the old episode
            finals = stacker.final(step.final_observation, step.truncated)
        stack = stacker.push(step.observation, step.terminated | step.truncated)

    The caller owns every array returned. With num_frames 1, observations pass through unchanged.
    """

    def __init__(self, num_frames: int) -> None:
        if num_frames < 1:
            raise ValueError(f"num_frames must be at least 1, got {num_frames}")
        self._num_frames = num_frames
        self._stack: ArrayNest = ()

    def reset(self, observation: ArrayNest) -> ArrayNest:
        """Starts with first frames [E, C, ...]; returns stacks [E, k * C, ...] that repeat them."""
        self._stack = map_leaves(self._repeated, observation)
        return self._stack

    def push(self, observation: ArrayNest, done: np.ndarray) -> ArrayNest:
        """Adds new frames [E, C, ...] and returns the stacks [E, k * C, ...].

        done: bool [E]; where true, an episode begins and its frame fills the whole stack.
        """
        pushed = map_leaves2(self._shifted_in, self._stack, observation)
        self._stack = self._restarted(pushed, observation, done) if done.any() else pushed
        return self._stack

    def final(self, final_observation: ArrayNest, truncated: np.ndarray) -> ArrayNest:
        """Returns stacks [K, k * C, ...] that end in the final observations of truncated episodes.

        final_observation: leaves [K, C, ...]. truncated: bool [E] with K entries that are true.
        """
        rows = map_leaves(lambda stack: stack[truncated], self._stack)
        stacks: ArrayNest = map_leaves2(self._shifted_in, rows, final_observation)
        return stacks

    def _restarted(self, stacks: ArrayNest, firsts: ArrayNest, done: np.ndarray) -> ArrayNest:
        def choose(stack: np.ndarray, first: np.ndarray) -> np.ndarray:
            return np.where(_over_leaf(done, stack), first, stack)

        restarted: ArrayNest = map_leaves2(choose, stacks, map_leaves(self._repeated, firsts))
        return restarted

    def _repeated(self, frames: np.ndarray) -> np.ndarray:
        if self._num_frames == 1:
            return frames
        return np.concatenate([frames] * self._num_frames, axis=1)

    def _shifted_in(self, stack: np.ndarray, frames: np.ndarray) -> np.ndarray:
        if self._num_frames == 1:
            return frames
        return np.concatenate([stack[:, frames.shape[1] :], frames], axis=1)


def _over_leaf(rows: np.ndarray, leaf: np.ndarray) -> np.ndarray:
    """Reshapes rows [E] so that they broadcast over leaf [E, ...]."""
    return rows.reshape((-1,) + (1,) * (leaf.ndim - 1))


def stacked_space(space: ObservationSpace, num_frames: int) -> ObservationSpace:
    """Returns the observation space as the policy sees it: C of every leaf times num_frames.

    Raises ValueError when num_frames > 1 and a leaf is a scalar.
    """
    stacked: ObservationSpace = map_leaves(lambda spec: _stacked_spec(spec, num_frames), space)
    return stacked


def _stacked_spec(spec: ArraySpec, num_frames: int) -> ArraySpec:
    if num_frames == 1:
        return spec
    if not spec.shape:
        raise ValueError(f"a number cannot be stacked {num_frames} times, give it the shape (1,)")
    return dataclasses.replace(
        spec,
        shape=(spec.shape[0] * num_frames, *spec.shape[1:]),
        categories=None if spec.categories is None else _repeated(spec.categories, num_frames),
        start=_repeated(spec.start, num_frames),
    )


def _repeated(numbers: tuple[int, ...], num_frames: int) -> tuple[int, ...]:
    """Repeats per-entry numbers for each frame; one number for all entries stays one."""
    return numbers if len(numbers) == 1 else numbers * num_frames
