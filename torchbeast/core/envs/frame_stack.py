# SPDX-License-Identifier: Apache-2.0
"""Stacks of the newest frames, rebuilt from single frames.

Environments send new frames only. The policy sees the newest k of them joined along the first
dimension of each leaf, oldest first; the first frame of an episode fills its whole stack, as
the original's FrameStack wrapper does. E is the number of environments, K the number of those
truncated in one step, C the first dimension of a leaf.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from torchbeast.core.envs.spaces import ArrayNest, ArraySpec, ObservationSpace
from torchbeast.core.nest_py import map_leaves, map_leaves2


class FrameStacker:
    """The newest num_frames observations of E environments.

        stack = stacker.reset(env.reset(seed))
        step = env.step(action)
        if step.final_observation is not None:      before push(), which forgets the old episode
            finals = stacker.final(step.final_observation, step.truncated)
        stack = stacker.push(step.observation, step.terminated | step.truncated)

    Every array returned belongs to the caller. With num_frames 1 observations pass through.
    """

    def __init__(self, num_frames: int) -> None:
        if num_frames < 1:
            raise ValueError(f"num_frames must be at least 1, got {num_frames}")
        self._num_frames = num_frames
        self._stack: ArrayNest = ()

    def reset(self, observation: ArrayNest) -> ArrayNest:
        """Stacks [E, k * C, ...] in which each first frame [E, C, ...] is repeated k times."""
        self._stack = map_leaves(self._repeated, observation)
        return self._stack

    def push(self, observation: ArrayNest, done: np.ndarray) -> ArrayNest:
        """Stacks [E, k * C, ...] with the new frames [E, C, ...]; filled by them where done [E]."""
        pushed = map_leaves2(self._shifted_in, self._stack, observation)
        self._stack = self._restarted(pushed, observation, done) if done.any() else pushed
        return self._stack

    def final(self, final_observation: ArrayNest, truncated: np.ndarray) -> ArrayNest:
        """Stacks [K, k * C, ...] of the truncated episodes, ending in their final [K, C, ...]."""
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
    """rows [E] in a shape that broadcasts over leaf [E, ...]."""
    return rows.reshape((-1,) + (1,) * (leaf.ndim - 1))


def stacked_space(space: ObservationSpace, num_frames: int) -> ObservationSpace:
    """The observation space as the policy sees it: C of every leaf times num_frames."""
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
    """One number for all entries stays one; those of the entries are said for each frame."""
    return numbers if len(numbers) == 1 else numbers * num_frames
