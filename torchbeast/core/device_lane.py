# SPDX-License-Identifier: Apache-2.0
"""A thread's own way to the device: what it copies and computes does not queue behind others.

    host, pageable -> pinned -> GPU     send       waits for nothing
    GPU -> pinned -> host               fetch      until `wait`
    this lane -> the thread's usual one hand_over  the GPU waits, the thread does not

On the CPU all of it is nothing: leaves are returned as they are.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


class DeviceLane:
    """A CUDA stream with its copies. Used by one thread, `with lane:` around what runs on it."""

    def __init__(self, device: torch.device) -> None:
        """What the calling thread has begun on the device before, the lane waits for."""
        self._device = device
        self._entered = contextlib.ExitStack()
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def __enter__(self) -> DeviceLane:
        if self._stream is not None:
            self._entered.enter_context(torch.cuda.stream(self._stream))
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def send(self, leaf: Tensor) -> Tensor:
        """The leaf on the device. Its memory may be written as soon as this returns, unless it is
        pinned: then not before the device has done with it.
        """
        if self._stream is None or leaf.device == self._device:
            return leaf
        return leaf.pin_memory().to(self._device, non_blocking=True)

    def fetch(self, leaf: Tensor) -> Tensor:
        """The leaf on the host; it holds nothing before `wait`."""
        if not leaf.is_cuda:
            return leaf
        host = torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True)
        return host.copy_(leaf, non_blocking=True)

    def wait(self) -> None:
        """Until the device has done all that was begun here."""
        if self._stream is not None:
            self._stream.synchronize()

    def hand_over(self, leaf: Tensor) -> Tensor:
        """A leaf made here, for the stream that the thread uses now, outside of the lane."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            leaf.record_stream(current)  # its memory is not given away while that one reads it
        return leaf
