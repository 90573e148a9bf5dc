# SPDX-License-Identifier: Apache-2.0
"""Videos of evaluation episodes.

A frame is the environment's own rendering if it has one, as Gymnasium's environments do, otherwise
the newest frame of the observation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from torchbeast.core.base.nest import flatten
from torchbeast.errors import UsageError

try:
    import cv2
except ImportError:
    raise UsageError("--mode test_render needs OpenCV: pip install 'torchbeast[video]'") from None

_FRAMES_PER_SECOND = 15.0  # Atari has 60, divided by the frame skip of 4
_SMALLEST = 240  # pixels a side; smaller frames are enlarged by a whole factor


class VideoWriter:
    """Writes an mp4 file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer = cv2.VideoWriter()

    def write(self, frame: np.ndarray) -> None:
        """Appends a frame, uint8 [H, W, 3] in RGB order; all frames have the same size."""
        if not self._writer.isOpened():
            size, code = (frame.shape[1], frame.shape[0]), cv2.VideoWriter.fourcc(*"mp4v")
            if not self._writer.open(str(self.path), code, _FRAMES_PER_SECOND, size):
                raise UsageError(f"OpenCV cannot write {self.path}: use --mode test")
        self._writer.write(np.ascontiguousarray(frame[..., ::-1]))  # OpenCV expects BGR

    def close(self) -> None:
        """Completes the file."""
        self._writer.release()


def picture(drawn: np.ndarray | None, observation: Any) -> np.ndarray:
    """Returns a frame of environment 0, uint8 [H, W, 3].

    drawn: the environment's rendering, or None. observation: nest of arrays [1, ...]. Raises
    UsageError if there is neither a rendering nor an image among the observations.
    """
    return to_frame(observation) if drawn is None else _enlarged(drawn)


def to_frame(observation: Any) -> np.ndarray:
    """Returns a frame uint8 [H, W, 3] of the first image [1, C, H, W] or [1, H, W, C].

    There are fewer channels than rows. Three channels are colours; with other numbers, it shows the
    last channel in gray. An image of booleans (MinAtar) shows each channel in a different shade of
    gray. Raises UsageError if no leaf is an image.
    """
    images = [leaf[0] for leaf in flatten(observation) if leaf.ndim == 4]
    if not images:
        raise UsageError(
            "--mode test_render needs a Gymnasium environment that renders itself, or "
            "observations that are images: use --mode test"
        )
    image = images[0] if images[0].shape[0] <= images[0].shape[2] else images[0].transpose(2, 0, 1)
    return _enlarged(np.broadcast_to(_visible(image).transpose(1, 2, 0), (*image.shape[1:], 3)))


def _visible(image: np.ndarray) -> np.ndarray:
    """Converts an image [C, H, W] to uint8 [1 or 3, H, W]."""
    if image.dtype == np.bool_:
        grays = np.linspace(255, 80, len(image)).astype(np.uint8)
        return (image * grays[:, None, None]).max(0, keepdims=True)
    newest = image if len(image) == 3 else image[-1:]
    if newest.dtype == np.uint8:
        return newest
    return (np.clip(newest, 0, 1) * 255).astype(np.uint8)


def _enlarged(frame: np.ndarray) -> np.ndarray:
    factor = max(1, -(-_SMALLEST // min(frame.shape[:2])))
    return frame.repeat(factor, axis=0).repeat(factor, axis=1)
