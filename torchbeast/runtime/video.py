# SPDX-License-Identifier: Apache-2.0
"""A video of what an image policy sees: the newest frame of every observation."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from torchbeast.core.nest_py import flatten
from torchbeast.runtime.errors import UsageError

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

    def write(self, observation: Any) -> None:
        """observation: nest of arrays `[1, ...]`, of which the first image `[1, C, H,
        W]` is shown.
        """
        frame = to_frame(observation)
        if self._writer is None:
            self._writer = self._open(frame)
        self._writer.write(frame)

    def _open(self, frame: np.ndarray) -> cv2.VideoWriter:
        height, width = frame.shape[:2]
        code = cv2.VideoWriter.fourcc(*"mp4v")
        writer = cv2.VideoWriter(str(self.path), code, _FRAMES_PER_SECOND, (width, height))
        if not writer.isOpened():
            raise UsageError(f"OpenCV cannot write {self.path}: use --mode test")
        return writer


def to_frame(observation: Any) -> np.ndarray:
    """The newest frame as uint8 `[H, W, 3]`; UsageError when nothing in the observation is an
    image.
    """
    images = [leaf[0] for leaf in flatten(observation) if leaf.ndim == 4]
    if not images:
        raise UsageError("--mode test_render needs observations that are images: use --mode test")
    image = images[0][-3:] if images[0].shape[0] == 3 else images[0][-1:]
    if image.dtype != np.uint8:
        image = (np.clip(image, 0, 1) * 255).astype(np.uint8)
    frame = np.broadcast_to(image.transpose(1, 2, 0), (*image.shape[1:], 3))[..., ::-1]
    factor = max(1, -(-_SMALLEST // min(frame.shape[:2])))
    return np.ascontiguousarray(frame.repeat(factor, axis=0).repeat(factor, axis=1))
