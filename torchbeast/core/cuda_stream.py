# SPDX-License-Identifier: Apache-2.0
"""A CUDA stream of a thread's own, so that its copies and kernels do not queue behind others.

    host, pageable -> pinned -> GPU          to_device   returns at once
    GPU -> pinned -> host                    to_host     complete after `synchronize`
    this stream -> the thread's usual one    hand_over   the GPU waits, the thread does not

On the CPU every method is a no-op that returns the leaf it was given.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


class CudaStream:
    """A CUDA stream and the copies that go through it.

    Used by one thread: `with cuda_stream:` runs the block's device work on this stream.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes the stream wait for the work that the calling thread has started on `device`."""
        self._device = device
        self._entered = contextlib.ExitStack()
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def __enter__(self) -> CudaStream:
        if self._stream is not None:
            self._entered.enter_context(torch.cuda.stream(self._stream))
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def to_device(self, leaf: Tensor) -> Tensor:
        """Returns the leaf on the device, any shape.

        The leaf's memory may be overwritten as soon as this returns, unless it is pinned: then only
        once the copy has finished.
        """
        if self._stream is None or leaf.device == self._device:
            return leaf
        return dense(leaf).pin_memory().to(self._device, non_blocking=True)

    def to_host(self, leaf: Tensor) -> Tensor:
        """Returns the leaf on the host, any shape; its values are valid after `synchronize`."""
        if not leaf.is_cuda:
            return leaf
        host = torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True)
        return host.copy_(leaf, non_blocking=True)

    def synchronize(self) -> None:
        """Blocks until the device has finished everything started on this stream."""
        if self._stream is not None:
            self._stream.synchronize()

    def hand_over(self, leaf: Tensor) -> Tensor:
        """Makes a leaf computed on this stream safe to use on the thread's current stream.

        Call it outside the `with` block. The current stream waits on the GPU; the thread does not.
        """
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            leaf.record_stream(current)  # keeps its memory from being reused during that read
        return leaf


def dense(leaf: Tensor) -> Tensor:
    """Returns the leaf with memory of its own for each element, in its own layout.

    Pinning copies into a tensor of the same strides, which is an error where elements share memory,
    as in an expanded tensor.
    """
    return leaf.contiguous() if 0 in leaf.stride() else leaf
