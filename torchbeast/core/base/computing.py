# SPDX-License-Identifier: Apache-2.0
"""How torch computes in this process: its settings around our own work and outside it, precision,
threads, and streams of copies to and from a GPU.

Code of the user may have changed any setting of torch or NumPy: a module may set another default
dtype when it is imported, and a caller may hold torch.no_grad() or torch.device("cuda").
`own_settings` sets those that our work relies on, and puts the user's back:

    default dtype     float32
    default device    the CPU
    gradients         are recorded, without inference mode
    autocast          off
    NumPy's errors    warnings, as NumPy's own defaults say

All other settings stay the user's, because our results do not rely on them: deterministic
algorithms, anomaly detection, TF32, cuDNN's benchmark mode, flushing denormal numbers, printing.

`OwnProcess` does the same with the settings that a run changes itself: torch's number of threads
and its random numbers.

Features, the expensive part of a network, may be computed in bfloat16 where the hardware supports
it: Intel's AMX and AVX512-BF16, ARM's BF16, a GPU's tensor cores. Elsewhere bfloat16 is emulated
and slower than float32, and a small network is always faster in float32, because converting costs
more than it saves. Weights, recurrent cores, policies, values, V-trace, losses and the optimiser
are always float32.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchbeast.core.base.specs import Precision

_ERRORS: dict[str, Any] = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
_UNCHANGED = nullcontext()


def own_settings() -> AbstractContextManager[None]:
    """Returns a context with the settings that our work relies on; where they hold it costs 2 us.

    User's code in it that sets others, as an imported module may, does not end it: enter it again
    after such code.
    """
    return _UNCHANGED if _torch_is_ours() and np.geterr() == _ERRORS else _set()


def own_torch_settings() -> AbstractContextManager[None]:
    """Returns `own_settings` without NumPy's; it costs 0.3 us while they hold."""
    return _UNCHANGED if _torch_is_ours() else _set()


def _torch_is_ours() -> bool:
    return (
        torch.get_default_dtype() is torch.float32
        and not _FLOAT32.within
        and not torch._C._len_torch_function_stack()  # a default device is on it
        and torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not torch._C._is_any_autocast_enabled()
    )


@contextmanager
def _set() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(_FLOAT32)
        stack.enter_context(np.errstate(**_ERRORS))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if not torch.is_grad_enabled():
            stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class _Float32:
    """float32 as the default dtype of the process while any thread is within."""

    def __init__(self) -> None:
        self.within = 0  # times that it was entered and not left yet
        self._lock = threading.Lock()
        self._users = torch.float32

    def __enter__(self) -> None:
        with self._lock:
            now = torch.get_default_dtype()
            if not self.within or now is not torch.float32:
                self._users = now
            torch.set_default_dtype(torch.float32)
            self.within += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.within -= 1
            if not self.within and torch.get_default_dtype() is torch.float32:
                torch.set_default_dtype(self._users)


_FLOAT32 = _Float32()


class OwnProcess:
    """torch's number of threads and random numbers as a run in another program's process has them.

        with own:      the run's, as they were when it was left last
            ...
                       the caller's, as they were before

    One thread at a time uses it, also within itself, and no two of them overlap: in several threads
    each would put back the other's settings. It costs 5 us.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._own: tuple[int, Tensor] | None = None  # None: it was never left

    def __enter__(self) -> None:
        if self._depth == 0:
            self._callers = torch.get_num_threads(), torch.get_rng_state()
            try:
                if self._own is not None:
                    _use(*self._own)
            except BaseException:  # an interrupt, after which __exit__ is not called
                _use(*self._callers)
                raise
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            try:
                self._own = torch.get_num_threads(), torch.get_rng_state()
            finally:
                _use(*self._callers)


def _use(threads: int, random: Tensor) -> None:
    torch.set_num_threads(threads)
    torch.set_rng_state(random)


@contextmanager
def one_thread() -> Iterator[None]:
    """Computes each operation in one thread on the CPU; afterwards in as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
        self._entered = ExitStack()
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


def numpys_scalars() -> AbstractContextManager[Any]:
    """Returns a context in which torch.load reads scalars of numpy too, still without running code
    from the file: PolyBeast 2019 saved returns as such.
    """
    scalar: Any = np.float32(0).__reduce__()[0]
    names = [(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    types = [type(np.dtype(kind)) for kind in ("bool", "int32", "int64", "float32", "float64")]
    return torch.serialization.safe_globals([*names, np.dtype, *types])


def _cpu_flags() -> set[str]:
    """Returns the instruction sets of the first core; empty where the system does not list them."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return set()
    flags = (line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "feat")))
    return set(next(flags, "").split())
