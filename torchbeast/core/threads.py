# SPDX-License-Identifier: Apache-2.0
"""The number of threads that torch's operations use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

set_by_us: set[int] = set()
"""Every number that `use_threads` has set in this process."""


def use_threads(number: int) -> None:
    """Computes each operation of this thread in so many threads on the CPU.

    The same holds for threads that use torch for the first time later.
    """
    set_by_us.add(number)
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
