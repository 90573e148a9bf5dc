# SPDX-License-Identifier: Apache-2.0
"""Frame stacks taken apart for storing, and rebuilt by copying.

A stack holds the newest k observations, concatenated along the first dimension, oldest first; the
first frame of an episode is repeated (`core/envs/frame_stack.py`). So only the newest frame of each
has to be stored. R is a number of rows, C the first dimension of a frame. With k = 1 a frame is
its own stack.

The frames of a rollout of B environments, [T+k, B, C, ...], are those of row 0's stack, followed by
the newest of each later row.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import numpy as np

from torchbeast.core.envs.spaces import ArraySpec

Run = tuple[slice, slice]  # where to, and where from: rows that are consecutive on both sides


def frame_spec(stack: ArraySpec, num_frames: int) -> ArraySpec:
    """Returns the spec of a frame [C, ...] of a stack [k * C, ...].

    Raises ValueError when the stack's shape does not allow num_frames.
    """
    if num_frames == 1:
        return stack
    if not stack.shape or stack.shape[0] % num_frames:
        raise ValueError(
            f"frame_stack is {num_frames}, but an observation of shape {list(stack.shape)} does "
            "not consist of so many frames along its first dimension"
        )
    return dataclasses.replace(stack, shape=(stack.shape[0] // num_frames, *stack.shape[1:]))


def newest(stacks: np.ndarray, num_frames: int) -> np.ndarray:
    """Returns the newest frames [R, C, ...] of stacks [R, k * C, ...], as a view."""
    if num_frames == 1:
        return stacks
    frames: np.ndarray = stacks[:, stacks.shape[1] // num_frames * (num_frames - 1) :]
    return frames


def continue_stacks(stacks: np.ndarray, before: np.ndarray, num_frames: int) -> np.ndarray:
    """Returns bool [R]: which of the stacks [R, k * C, ...] differ from those in `before` only by
    having dropped the oldest frame and added one. Bits are compared.
    """
    older, kept = _words(stacks, num_frames)[:, :-1], _words(before, num_frames)[:, 1:]
    equal: np.ndarray = (older == kept).all(axis=(1, 2))
    return equal


def repeat_a_frame(stacks: np.ndarray, num_frames: int) -> np.ndarray:
    """Returns bool [R]: which of the stacks [R, k * C, ...] consist of one frame, k times."""
    frames = _words(stacks, num_frames)
    equal: np.ndarray = (frames[:, :-1] == frames[:, -1:]).all(axis=(1, 2))
    return equal


def _words(stacks: np.ndarray, num_frames: int) -> np.ndarray:
    """Returns stacks as unsigned integers [R, k, words per frame], of 8 bytes where possible: they
    are compared quickly, and a NaN equals itself.
    """
    entries = math.prod(stacks.shape[1:]) // num_frames
    frames = stacks.reshape(len(stacks), num_frames, entries)
    size = entries * frames.itemsize
    width = next(width for width in (8, 4, 2, 1) if size % width == 0)
    words: np.ndarray = frames.view(f"u{width}")
    return words


def stack_positions(positions: np.ndarray, starts: np.ndarray, num_frames: int) -> np.ndarray:
    """Returns the positions [R, k] of the frames of each row's stack, oldest first.

    positions: [R] of the rows. starts: [R] of the first rows of their episodes.
    """
    ages = np.arange(num_frames - 1, -1, -1)
    frames: np.ndarray = np.maximum(positions[:, None] - ages, starts[:, None])
    return frames


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
    if not oldest:
        stacks[...] = frames
        return
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
