# SPDX-License-Identifier: Apache-2.0
"""A video of what is played: the environment's own picture of itself where it draws one (those of
Gymnasium), else what the policy sees, the newest frame of every observation.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from torchbeast.core.envs.vec_env import SyncVecEnv, VecEnv
from torchbeast.core.nest_py import flatten
from torchbeast.errors import UsageError

try:
    import cv2
except ImportError:
    raise UsageError(
        "--mode test_render needs OpenCV: pip install opencv-python-headless"
    ) from None

_FRAMES_PER_SECOND = 15.0  # Atari's 60 over a frame skip of 4
_SMALLEST = 240  # pixels; smaller frames are enlarged, each pixel to a square


class VideoWriter:
    """Writes an mp4 file; used as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer: cv2.VideoWriter | None = None

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.release()

    def write(self, frame: np.ndarray) -> None:
        """frame: uint8 `[H, W, 3]`, red first; all of one size."""
        if self._writer is None:
            self._writer = self._open(frame)
        self._writer.write(np.ascontiguousarray(frame[..., ::-1]))  # OpenCV has blue first

    def _open(self, frame: np.ndarray) -> cv2.VideoWriter:
        height, width = frame.shape[:2]
        code = cv2.VideoWriter.fourcc(*"mp4v")
        writer = cv2.VideoWriter(str(self.path), code, _FRAMES_PER_SECOND, (width, height))
        if not writer.isOpened():
            raise UsageError(f"OpenCV cannot write {self.path}: use --mode test")
        return writer


def picture(env: VecEnv, observation: Any) -> np.ndarray:
    """A uint8 frame `[H, W, 3]` of environment 0; UsageError when there is nothing to be seen.

    observation: nest of arrays `[1, ...]`.
    """
    drawn = env.render() if isinstance(env, SyncVecEnv) else None
    return to_frame(observation) if drawn is None else _enlarged(drawn)


def to_frame(observation: Any) -> np.ndarray:
    """The newest frame of the first image `[1, C, H, W]` or `[1, H, W, C]`, channels being fewer
    than rows. Three channels are colours, the newest of others is gray; an image of bits (MinAtar)
    shows every channel in a gray of its own.
    """
    images = [leaf[0] for leaf in flatten(observation) if leaf.ndim == 4]
    if not images:
        raise UsageError(
            "--mode test_render needs an environment of Gymnasium that draws itself, or "
            "observations that are images: use --mode test"
        )
    image = images[0] if images[0].shape[0] <= images[0].shape[2] else images[0].transpose(2, 0, 1)
    return _enlarged(np.broadcast_to(_visible(image).transpose(1, 2, 0), (*image.shape[1:], 3)))


def _visible(image: np.ndarray) -> np.ndarray:
    """[C, H, W] to uint8 [1 or 3, H, W]."""
    if image.dtype == np.bool_:
        grays = np.linspace(255, 80, len(image)).astype(np.uint8)
        shown: np.ndarray = (image * grays[:, None, None]).max(0, keepdims=True)
        return shown
    newest = image if len(image) == 3 else image[-1:]
    if newest.dtype == np.uint8:
        return newest
    scaled: np.ndarray = (np.clip(newest, 0, 1) * 255).astype(np.uint8)
    return scaled


def _enlarged(frame: np.ndarray) -> np.ndarray:
    factor = max(1, -(-_SMALLEST // min(frame.shape[:2])))
    return frame.repeat(factor, axis=0).repeat(factor, axis=1)
