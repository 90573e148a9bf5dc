# SPDX-License-Identifier: Apache-2.0
"""Stacks of the newest frames, rebuilt from single frames.

Environments send only new frames. The policy sees the newest k of them, concatenated along the
first dimension of each leaf, oldest first. The first frame of an episode is repeated k times, as in
the original's FrameStack wrapper. E is the number of environments, K the number of those truncated
in one step, C the first dimension of a leaf.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np

from torchbeast.core.base.checks import at_least
from torchbeast.core.base.nest import map_leaves, map_leaves2
from torchbeast.core.envs.contract import VecStep
from torchbeast.core.envs.spaces import ArrayNest, ArraySpec, ObservationSpace


class FrameStacker:
    """Keeps the newest num_frames observations of E environments as stacks.

        stack = stacker.reset(env.reset(seed))
        step = stacker.stacked(env.step(action))

    The caller owns every array returned. With num_frames 1, observations pass through unchanged.
    """

    def __init__(self, num_frames: int) -> None:
        at_least(1, num_frames=num_frames)
        self._num_frames = num_frames
        self._stack: ArrayNest = ()

    def reset(self, observation: ArrayNest) -> ArrayNest:
        """Starts with first frames [E, C, ...]; returns stacks [E, k * C, ...] that repeat them."""
        self._stack = map_leaves(self._repeated, observation)
        return self._stack

    def stacked(self, step: VecStep) -> VecStep:
        """Returns a step's results with stacks in place of its frames."""
        if self._num_frames == 1:
            return step
        final = step.final_observation
        if final is not None:  # before the push, which forgets the episodes that ended
            final = self.final(final, step.truncated)
        observation = self.push(step.observation, step.terminated | step.truncated)
        return step._replace(observation=observation, final_observation=final)

    def push(self, observation: ArrayNest, done: np.ndarray) -> ArrayNest:
        """Adds new frames [E, C, ...] and returns the stacks [E, k * C, ...].

        done: bool [E]; where true, an episode begins and its frame fills the whole stack.
        """

        def pushed(stack: np.ndarray, frames: np.ndarray) -> np.ndarray:
            stacks = self._shifted(stack, frames)
            if done.any() and stacks is not frames:  # the caller's; a stack of one repeats nothing
                stacks[done] = self._repeated(frames[done])
            return stacks

        self._stack = map_leaves2(pushed, self._stack, observation)
        return self._stack

    def final(self, final_observation: ArrayNest, truncated: np.ndarray) -> ArrayNest:
        """Returns stacks [K, k * C, ...] that end in the final observations of truncated episodes.

        final_observation: leaves [K, C, ...]. truncated: bool [E] with K entries that are true.
        """
        rows = map_leaves(lambda stack: stack[truncated], self._stack)
        return map_leaves2(self._shifted, rows, final_observation)

    def _repeated(self, frames: np.ndarray) -> np.ndarray:
        if self._num_frames == 1:
            return frames
        return np.concatenate([frames] * self._num_frames, axis=1)

    def _shifted(self, stacks: np.ndarray, frames: np.ndarray) -> np.ndarray:
        return shifted(stacks, frames, self._num_frames)


def shifted(stacks: np.ndarray, frames: np.ndarray, num_frames: int) -> np.ndarray:
    """Returns stacks [R, k * C, ...] without their oldest frames and with others [R, C, ...]."""
    if num_frames == 1:
        return frames
    return np.concatenate([stacks[:, frames.shape[1] :], frames], axis=1)


def stacked_space(space: ObservationSpace, num_frames: int) -> ObservationSpace:
    """Returns the observation space as the policy sees it: C of every leaf times num_frames.

    Raises ValueError when num_frames > 1 and a leaf is a scalar.
    """
    return map_leaves(lambda spec: _stacked_spec(spec, num_frames), space)


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


Run = tuple[slice, slice]  # where to, and where from: rows that are consecutive on both sides


def frame_spec(stack: ArraySpec, num_frames: int) -> ArraySpec:
    """Returns the shape and dtype of a frame [C, ...] of a stack [k * C, ...].

    Raises ValueError when the stack's shape does not allow num_frames.
    """
    if num_frames == 1:
        return stack
    if not stack.shape or stack.shape[0] % num_frames:
        raise ValueError(
            f"frame_stack is {num_frames}, but an observation of shape {list(stack.shape)} does "
            f"not consist of {num_frames} frames along its first dimension"
        )
    return ArraySpec((stack.shape[0] // num_frames, *stack.shape[1:]), stack.dtype)


def newest(stacks: np.ndarray, num_frames: int) -> np.ndarray:
    """Returns the newest frames [R, C, ...] of stacks [R, k * C, ...], as a view."""
    if num_frames == 1:
        return stacks
    return stacks[:, stacks.shape[1] // num_frames * (num_frames - 1) :]


def stack_positions(positions: np.ndarray, starts: np.ndarray, num_frames: int) -> np.ndarray:
    """Returns the positions [R, k] of the frames of each row's stack, oldest first.

    positions: [R] of the rows. starts: [R] of the first rows of their episodes.
    """
    ages = np.arange(num_frames - 1, -1, -1)
    return np.maximum(positions[:, None] - ages, starts[:, None])


def store_row(frames: np.ndarray, t: int, stacks: np.ndarray, num_frames: int) -> None:
    """Stores row t of a rollout, stacks [B, k * C, ...], in its frames [T+k, B, C, ...]."""
    if t > 0:
        frames[num_frames - 1 + t] = newest(stacks, num_frames)
        return
    shape = len(stacks), num_frames, *frames.shape[2:]
    frames[:num_frames] = stacks.reshape(shape).swapaxes(0, 1)


def rebuild_rows(stacks: np.ndarray, frames: np.ndarray, done: np.ndarray) -> None:
    """Writes the stacks [T+1, B, k * C, ...] of a rollout with these frames [T+k, B, C, ...].

    done: bool [T+1, B], true where an episode begins; it does not matter in row 0.
    """
    rows, oldest = len(stacks), len(frames) - len(stacks)  # position of the newest, which is k - 1
    parts = stacks.reshape(*stacks.shape[:2], oldest + 1, *frames.shape[2:])  # a view
    for position in range(oldest + 1):
        parts[:, :, position] = frames[position : position + rows]
    for before, column in np.argwhere(done[1:]):  # by row: a later episode takes precedence
        first = 1 + before
        for row in range(first, min(first + oldest, rows)):
            parts[row, column, : first + oldest - row] = frames[first + oldest, column]


def runs(rows: np.ndarray) -> list[Run]:
    """Splits rows [R], to be copied to 0, ..., R-1, into runs of consecutive ones."""
    cuts = 1 + np.flatnonzero(rows[1:] - rows[:-1] != 1)
    bounds = [0, *cuts.tolist(), len(rows)]
    return [
        (slice(start, end), slice(int(rows[start]), int(rows[start]) + end - start))
        for start, end in pairwise(bounds)
    ]


def copy_runs(to: np.ndarray, source: np.ndarray, rows: list[Run]) -> None:
    """Copies rows of source [N, ...] to rows 0, ..., R-1 of `to` [R, ...]."""
    for here, there in rows:
        to[here] = source[there]
