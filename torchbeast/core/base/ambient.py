# SPDX-License-Identifier: Apache-2.0
"""The ambient settings of torch and NumPy, around our own work and outside it.

Code of the user may have changed any of them: a module may set another default dtype when it is
imported, and a caller may hold torch.no_grad() or torch.device("cuda"). `own_settings` sets those
that our work relies on, and puts the user's back:

    default dtype     float32
    default device    the CPU
    gradients         are recorded, without inference mode
    autocast          off
    NumPy's errors    warnings, as NumPy's own defaults say

All other settings stay the user's, because our results do not rely on them: deterministic
algorithms, anomaly detection, TF32, cuDNN's benchmark mode, flushing denormal numbers, printing.

`OwnProcess` does the same with the settings that a run changes itself: torch's number of threads
and its random numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
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
        stack.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
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
        self._depth += 1
        if self._depth == 1:
            self._callers = torch.get_num_threads(), torch.get_rng_state()
            if self._own is not None:
                _use(*self._own)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._own = torch.get_num_threads(), torch.get_rng_state()
            _use(*self._callers)


def _use(threads: int, random: Tensor) -> None:
    torch.set_num_threads(threads)
    torch.set_rng_state(random)


def use_threads(number: int) -> None:
    """Computes each operation of this thread in so many threads on the CPU.

    The same holds for threads that use torch for the first time later.
    """
    torch.set_num_threads(number)


@contextmanager
def one_thread() -> Iterator[None]:
    """Computes each operation in one thread on the CPU; afterwards in as many as before."""
    before = torch.get_num_threads()
    use_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
