# SPDX-License-Identifier: Apache-2.0
"""The device that computes: the precision of its networks, and streams of copies to and from it.

Features, the expensive part of a network, may be computed in bfloat16 where the hardware supports
it: Intel's AMX and AVX512-BF16, ARM's BF16, a GPU's tensor cores. Elsewhere bfloat16 is emulated
and slower than float32, and a small network is always faster in float32, because converting costs
more than it saves. Weights, recurrent cores, policies, values, V-trace, losses and the optimiser
are always float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from torchbeast.core.base.specs import Precision


class CudaStream:
    """A CUDA stream of one thread, so that its copies and kernels do not queue behind others.

        host, pageable -> pinned -> GPU          to_device   returns at once
        GPU -> pinned -> host                    to_host     complete after `synchronize`
        this stream -> the thread's usual one    hand_over   the GPU waits, the thread does not

    `with cuda_stream:` runs the block's device work on this stream. On the CPU every method is a
    no-op that returns the leaf it was given.
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
    """Returns the leaf with separate memory for each element, in the same layout.

    Pinning copies into a tensor of the same strides, which is an error where elements share memory,
    as in an expanded tensor.
    """
    return leaf.contiguous() if 0 in leaf.stride() else leaf


# Linux's names of these instructions on x86 and ARM.
_CPU_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}
_TENSOR_CORES_WITH_BFLOAT16 = (8, 0)  # compute capability: Ampere
_CPU_INFO = Path("/proc/cpuinfo")


# On an Intel Xeon with AVX512-BF16 two layers of 64 act for 8 environments 3.5 times as fast in
# float32 and learn from 256 rows twice as fast; two of 256 (70,000 weights) learn from those 1.4
# times as fast in bfloat16.
_SMALL = 50_000  # weights


def dtype_for(
    precision: Precision, device: torch.device, weights: Iterable[nn.Parameter]
) -> torch.dtype:
    """Returns the dtype of a network's features; "auto" is bfloat16 where the hardware supports it,
    but not for a small network on the CPU, and not if nothing would be computed in it.

    weights: see Actor.feature_weights.
    """
    if precision == "auto":
        parameters = list(weights)
        is_slower = device.type == "cpu" and _is_small(parameters)
        gains = parameters and has_bfloat16(device) and not is_slower
        return torch.bfloat16 if gains else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def _is_small(parameters: list[nn.Parameter]) -> bool:
    """Returns whether a network has few weights and no convolution, which uses each many times."""
    has_convolutions = any(parameter.dim() > 2 for parameter in parameters)
    return not has_convolutions and sum(map(torch.numel, parameters)) < _SMALL


def has_bfloat16(device: torch.device) -> bool:
    """Returns whether the device multiplies bfloat16 in hardware."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= _TENSOR_CORES_WITH_BFLOAT16
    return device.type == "cpu" and not _CPU_FLAGS.isdisjoint(_cpu_flags())


def computing_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[None]:
    """Returns a context in which convolutions and matrix products are computed in `dtype`.

    Autocast's weight cache is off because all threads share it: a thread that records no graph
    would leave a weight there that receives no gradient in another thread.
    """
    is_needed = dtype != torch.float32
    if not is_needed and not torch.is_autocast_enabled(device.type):
        return nullcontext()  # entering and leaving autocast takes 20 us
    return torch.autocast(device.type, dtype, enabled=is_needed, cache_enabled=False)


def _cpu_flags() -> set[str]:
    """Returns the instruction sets of the first core; empty where the system does not list them."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return set()
    flags = (line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "feat")))
    return set(next(flags, "").split())
